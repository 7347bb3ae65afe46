"""What the environment says: words of switches and numbers, or an error that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_p2p import InvalidArgumentError, env

SWITCHES: dict[str, Callable[[], bool]] = {
    "MOE_P2P_AS_DEEP_EP": env.as_deep_ep,
    "MOE_P2P_AS_DEEP_EP_V25": env.as_deep_ep_v25,
    "MOE_P2P_AS_MOONCAKE": env.as_mooncake,
    "MOE_P2P_AS_NIXL_EP": env.as_nixl_ep,
    "MOE_P2P_DIRECT": env.direct,
    "MOE_P2P_ENGINES": env.engines,
    "MOE_P2P_FABRIC": env.fabric,
    "MOE_P2P_NVTX": env.nvtx,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_take_usual_words_and_refuse_others_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on = SWITCHES[name]
    for words, wanted in ((" 1 true True ON yes", True), ("0 false OFF No", False)):
        for word in words.split(" "):
            monkeypatch.setenv(name, word)
            assert is_on() is (wanted if word else name == "MOE_P2P_DIRECT")
    for word in ("2", "y", "enable", "1,"):
        monkeypatch.setenv(name, word)
        with pytest.raises(InvalidArgumentError, match=f"{name} is '{word}', must be one of 1, tr"):
            is_on()
    monkeypatch.delenv(name)
    assert is_on() is (name == "MOE_P2P_DIRECT")


@pytest.mark.parametrize("word", ["abc", "0", "-3", "nan"])
def test_a_deadline_that_is_no_number_is_refused_by_name(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", word)
    with pytest.raises(InvalidArgumentError, match=f"MC_TRANSFER_TIMEOUT is '{word}', must be a"):
        env.mooncake_timeout_s()
