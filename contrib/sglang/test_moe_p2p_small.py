"""GSM8K over the moe_p2p dispatcher, which the moe_p2p plugin gives to the backend `customized`.

With attention DP, questions one at a time leave all ranks but one without tokens.
"""

import importlib.util
import unittest
from types import SimpleNamespace

from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.run_eval import run_eval
from sglang.test.test_utils import (
    DEFAULT_MODEL_NAME_FOR_TEST_MLA,
    DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
    DEFAULT_URL_FOR_TEST,
    CustomTestCase,
    popen_launch_server,
)

register_cuda_ci(est_time=420, stage="base-c", runner_config="deepep-4-gpu-h100")

EP_ARGS = ["--moe-a2a-backend", "customized", "--tp", "4", "--ep-size", "4"]
ATTENTION_DP_ARGS = ["--attn-dp-size", "4", "--mem-fraction-static", "0.5"]


class Server:
    args: list[str]

    @classmethod
    def setUpClass(cls):
        if importlib.util.find_spec("moe_p2p") is None:
            raise unittest.SkipTest("needs the moe_p2p package")
        cls.process = popen_launch_server(
            DEFAULT_MODEL_NAME_FOR_TEST_MLA,
            DEFAULT_URL_FOR_TEST,
            timeout=DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
            other_args=["--trust-remote-code", *cls.args],
        )

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def check_gsm8k(self, num_examples: int, num_threads: int, score: float):
        metrics = run_eval(
            SimpleNamespace(
                base_url=DEFAULT_URL_FOR_TEST,
                model=DEFAULT_MODEL_NAME_FOR_TEST_MLA,
                eval_name="gsm8k",
                api="completion",
                max_tokens=512,
                num_examples=num_examples,
                num_threads=num_threads,
            )
        )
        print(metrics)
        assert metrics["score"] > score


class TestTP(Server, CustomTestCase):
    args = EP_ARGS

    def test_gsm8k(self):
        self.check_gsm8k(num_examples=200, num_threads=128, score=0.60)


class TestAttentionDP(Server, CustomTestCase):
    args = EP_ARGS + ATTENTION_DP_ARGS

    def test_gsm8k(self):
        self.check_gsm8k(num_examples=200, num_threads=128, score=0.60)

    def test_gsm8k_one_at_a_time(self):
        self.check_gsm8k(num_examples=40, num_threads=1, score=0.50)


if __name__ == "__main__":
    unittest.main()
