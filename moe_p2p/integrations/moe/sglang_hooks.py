"""SGLang's `--moe-a2a-backend customized` over AllToAll, through SGLang's plugin hooks only.

    sglang serve --model-path MODEL --tp 8 --ep-size 8 --moe-a2a-backend customized

SGLang knows this backend by name, but its command line does not offer it, its models do not ask for
it and no dispatcher belongs to it. Each hook below mends one of these; other backends stay as they
are. Rows have DeepEP's two formats, whose permutations SGLang's runners have registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_p2p import errors
from moe_p2p.integrations import optional, required

_NAME = "customized"
_UTILS = "sglang.srt.layers.moe.utils"
_OVERLAP = "sglang.srt.batch_overlap.two_batch_overlap"


def register(dispatcher_class: Callable[[], Any]) -> None:
    """Registers the hooks; SGLang applies them once its plugins have run.

    dispatcher_class: returns the class of the backend's dispatchers; called when the first is made.
    Does nothing in versions that do not know the backend.
    """
    registry = optional("sglang.srt.plugins.hook_registry")
    known = getattr(optional(_UTILS), "MoeA2ABackend", None)
    if registry is None or not hasattr(known, "CUSTOMIZED"):
        return
    make_inners = functools.partial(_make_inners, dispatcher_class)
    kind, add = registry.HookType, registry.HookRegistry.register
    add("sglang.srt.server_args.ServerArgs.add_cli_args", _offer, kind.AFTER)
    add(f"{_UTILS}.MoeA2ABackend.is_deepep", _is_deepep, kind.AROUND)
    add(f"{_OVERLAP}.MaybeTboDeepEPDispatcher.__init__", make_inners, kind.AROUND)
    buffer = "sglang.srt.layers.moe.token_dispatcher.deepep.DeepEPBuffer"
    add(f"{buffer}.clean_buffer", _clean_buffer, kind.AROUND)


def _offer(_: None, parser: Any) -> None:
    """Lets the command line choose the backend."""
    action = parser._option_string_actions.get("--moe-a2a-backend")  # argparse has no public way
    choices = getattr(action, "choices", None)
    if choices is not None and _NAME not in choices:
        action.choices = [*choices, _NAME]


def _is_deepep(original: Callable[..., bool], backend: Any) -> bool:
    """Models and runners then treat the backend as DeepEP's: its combine returns whole sums."""
    return original(backend) or backend.value == _NAME


def _make_inners(
    dispatcher_class: Callable[[], Any],
    original: Callable[..., None],
    dispatcher: Any,
    runner_backend: Any = None,
    **given: Any,
) -> None:
    """Makes our dispatcher for each batch that overlaps."""
    if not _is_customized():
        original(dispatcher, runner_backend=runner_backend, **given)
        return
    num_experts, num_ranks = given["num_experts"], given["group"].size()
    errors.require(
        given["num_local_experts"] * num_ranks == num_experts,
        f"{given['num_local_experts']} of {num_experts} experts are on each of {num_ranks} ranks: "
        f"start SGLang with --ep-size {num_ranks}",
    )
    overlap = required(_OVERLAP, "sglang")
    super(overlap.MaybeTboDeepEPDispatcher, dispatcher).__init__()
    dispatcher._inners = [
        dispatcher_class()(runner_backend=runner_backend, **given)
        for _ in range(2 if overlap.is_tbo_enabled() else 1)
    ]


def _clean_buffer(original: Callable[..., None], buffer: Any) -> None:
    """Changes of mode clean DeepEP's buffer in SGLang; here is none."""
    if not _is_customized():
        original(buffer)


def _is_customized() -> bool:
    return bool(required(_UTILS, "sglang").get_moe_a2a_backend().value == _NAME)
