"""The parts that both adapters share: wrapped functions, random generators, options refused by name, Adam's state."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..worker.adapter import Adapter, Scalars
from ..worker.patching import Function as Function, around

REMEDY = "or run this job without deadpool_plugin"
MOMENTS = ("exp_avg", "exp_avg_sq")
PLAIN = (bool, int, float, str, type(None), tuple, list)
_PLAIN = frozenset(PLAIN)


class Nesting:
    """The calls, or step functions of the script's, that run within each other."""

    busy = False
    """A call is under way: what the framework asks of itself is no call."""
    is_training = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        outer, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = outer


def in_place_of(owner: Any, name: str) -> Callable[[Function], None]:
    """Put the decorated function in the place of `owner.name`. Its first argument is the original."""
    return lambda function: setattr(owner, name, around(getattr(owner, name), function))


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call `act` before each call of `owner.name`, with its arguments."""

    @in_place_of(owner, name)
    def function(original: Function, *args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)


def after_init(cls: type, act: Callable[[Any], None]) -> None:
    """Call `act` with each instance of `cls` once it is initialised."""

    @in_place_of(cls, "__init__")
    def init(original: Function, instance: Any, *args: Any, **kwargs: Any) -> None:
        original(instance, *args, **kwargs)
        act(instance)


class FrameworkAdapter(Adapter):
    """An adapter whose framework has random generators of the model's beside torch's."""

    calls: Nesting
    trackers: tuple[str, ...]
    """Modules that have such generators, if a script imports them."""

    def inside_step(self) -> contextlib.AbstractContextManager[None]:
        return self.calls.inside()

    def rng_states(self) -> dict[str, Any]:
        return {
            module: {
                name: one.get_state() if isinstance(one, torch.Generator) else one  # with Megatron's --te-rng-tracker
                for name, one in tracker.get_states().items()
            }
            for module, tracker in self._rng_trackers().items()
        }

    def set_rng_states(self, states: dict[str, Any]) -> None:
        for module, tracker in self._rng_trackers().items():
            if module in states:
                kept = dict(states[module])
                for name, one in tracker.get_states().items():
                    if isinstance(one, torch.Generator) and name in kept:
                        one.set_state(kept[name])
                        kept[name] = one
                tracker.set_states(kept)

    def _rng_trackers(self) -> dict[str, Any]:
        return {name: sys.modules[name].get_cuda_rng_tracker() for name in self.trackers if name in sys.modules}


@dataclass(frozen=True)
class Option:
    """An option of a framework's that a swap cannot restore, or several alike.

    `paths`: attributes, methods without arguments and keys that lead to its value in a configuration or an engine.
    `harmless`: the values that are not refused. `called`: its name in messages, if it is not the path.
    """

    paths: str
    reason: str
    remedy: str = "leave it out"
    harmless: tuple[Any, ...] = (None, False)
    called: str = ""


def value_at(path: str, owner: Any) -> Any:
    """Return an option's value in `owner`; None if this version lacks it."""
    for name in path.split("."):
        owner = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        if callable(owner):
            owner = owner()
    return owner


def refuse(owner: Any, options: Sequence[Option]) -> None:
    """Raises: Unsupported, naming the option that is not harmless, why, and what to do instead."""
    for option in options:
        for path in option.paths.split():
            if (value := value_at(path, owner)) not in option.harmless:
                raise Unsupported(
                    f"{option.called or path} = {value!r} {option.reason}",
                    f"it to be {' or '.join(map(repr, option.harmless))}",
                    f"{option.remedy}, {REMEDY}",
                )


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class AdamState:
    """An Adam of any maker: its groups, the masters it updates, and the state beside each of them.

    What is missing of the state is made as the optimizer would make it. `tensors`: masters and moments.
    Raises: Unsupported for masters that are not fp32 (with this `remedy`), and for a third moment.
    """

    def __init__(self, optimizer: Any, masters: Sequence[torch.Tensor], remedy: str) -> None:
        self.optimizer, self.masters, self.groups = optimizer, masters, optimizer.param_groups
        for dtype in {master.dtype for master in masters} - {torch.float32}:
            raise Unsupported(f"the optimizer updates parameters in {dtype}", "fp32 masters", remedy)
        if any(group.get("amsgrad") for group in self.groups):
            raise Unsupported(
                "Adam with amsgrad=True keeps a third moment that is not mirrored",
                "amsgrad=False",
                f"leave it out, {REMEDY}",
            )
        # torch's Adam counts updates in a tensor of each state (torch/optim/adam.py `_init_group`), DeepSpeed's in a
        # number there; apex's and Transformer Engine's FusedAdam count in the group, and the latter cannot save a state
        # with anything else (fused_adam.py `state_dict`).
        maker = type(optimizer).__module__.partition(".")[0]
        on_device = any(group.get("fused") or group.get("capturable") for group in self.groups)
        for master, state in zip(masters, self.states(), strict=True):
            if "exp_avg" not in state:
                if maker == "deepspeed":
                    state["step"] = 0
                elif maker not in ("apex", "transformer_engine"):
                    state["step"] = torch.tensor(0.0, dtype=torch.float32, device=master.device if on_device else "cpu")
                for name in MOMENTS:
                    state[name] = torch.zeros_like(master.data, memory_format=torch.preserve_format)
        self._counts: tuple[list[torch.Tensor], list[int], list[ctypes.c_float]] = [], [], []
        self.moments = [state[name] for state in self.states() for name in MOMENTS]
        self.tensors = [*(master.data for master in masters), *self.moments]

    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[master] for master in self.masters]

    def steps(self) -> list[float | None]:
        """Return the updates counted beside each master. None: they are counted in its group."""
        steps: list[Any] = [state.get("step") for state in self.states()]
        known, places, counts = self._counts
        # They are as many as parameters: each is read where it lies, without a function of torch's.
        is_known = len(steps) == len(known) and all(map(operator.is_, steps, known))
        if is_known and [*map(torch.Tensor.data_ptr, known)] == places:
            return [count.value for count in counts]
        kinds = {isinstance(one, torch.Tensor) and (one.is_cpu, one.dim(), one.dtype) for one in steps}
        if kinds == {(True, 0, torch.float32)}:
            places = [step.data_ptr() for step in steps]
            self._counts = steps, places, [ctypes.c_float.from_address(place) for place in places]
        return [None if step is None else float(step) for step in steps]

    def load_steps(self, steps: Sequence[float | None]) -> None:
        for state, step in zip(self.states(), steps, strict=True):
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(step)
            elif step is not None:
                state["step"] = int(step)

    def scalars(self) -> list[Scalars]:
        """Collect learning rates, betas and the like of all groups. Raises: Unsupported for other than plain data."""
        found = []
        for group in self.groups:
            values = dict(group)
            del values["params"]
            if not _PLAIN.issuperset(map(type, values.values())):
                for key, value in values.items():
                    if not isinstance(value, PLAIN):
                        what = f"parameter group entry {key!r} is {type(value).__name__}"
                        raise Unsupported(what, "plain data", f"leave it out, {REMEDY}")
            found.append(values)
        return found

    def load_scalars(self, saved: Sequence[Scalars]) -> None:
        for group, values in zip(self.groups, saved, strict=True):
            for key in group.keys() - values.keys() - {"params"}:
                del group[key]  # came later: a fused Adam makes its "step" in the first update
            for key, value in values.items():
                mine = group.get(key)
                if not isinstance(mine, tuple):
                    group[key] = value
                elif mine != tuple(value):  # equal betas stay one object in all groups, which torch.save writes once
                    group[key] = tuple(value)
