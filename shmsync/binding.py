"""The binding: modules whose parameters follow a channel, switched together between two forwards."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import device, slots, switching
from .errors import BindingError
from .gate import Gate
from .layout import Layout
from .outputs import Aliases, privatize
from .streams import ReaderStreams
from .subscriber import Subscriber
from .targets import MODES, Targets, View

# By id, since modules need not be hashable or comparable (TensorDictParams compares by element). Weak on both sides: a
# binding refers to its modules, and would keep them for ever.
_bindings: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[Binding]]] = {}
_registry_lock = threading.Lock()


with contextlib.suppress(ImportError, AttributeError):
    # torch.compile of a bound module must not trace into the gate's locks: it compiles around them.
    from torch._dynamo import trace_rules

    trace_rules.add("shmsync")


class Binding:
    """Modules whose parameters alias the slot that this binding leases. Made by ``Subscriber.bind``.

    Contract: a forward with no news makes no system call; a switch happens between two forwards, all modules together;
    several threads may run the modules; buffers are the worker's own and are refreshed at a switch.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        models: Mapping[str, nn.Module],
        mode: str = "auto",
        *,
        wrap: bool = True,
        steady: bool = False,
    ) -> None:
        if mode not in MODES:
            raise BindingError(f"Expected mode as one of {MODES}, got {mode!r}")
        self._subscriber, self._models, self._asked = subscriber, dict(models), mode
        # A compiled module may run as a CUDA graph, which reads where the parameters were when it was captured.
        self._steady = steady or any(map(_is_compiled, self._models.values()))
        self._bound = slots.Bound()
        self._targets: Targets | None = None
        self._aliases = Aliases()
        self._streams: ReaderStreams | None = None  # of its devices, if it is on any
        self._gate = Gate(self._has_news, self._switch)
        self._at_entry: Callable[[int], None] | None = None
        self._open = True
        if subscriber.layout is not None:
            self._resolve()
        self._take_over()
        subscriber._bindings.append(self)
        if wrap:
            for module in self._models.values():
                _put_gate(self, module)
        subscriber.wish()
        self._gate.try_switch()
        deadline = time.monotonic() + switching.BRING_SECONDS
        while not self._bound.word and switching.awaits_bytes(subscriber) and time.monotonic() < deadline:
            self._gate.try_switch()  # the first forward should be on what is published already

    @property
    def mode(self) -> str:
        """ "map" or "copy"; what was asked for while the channel has no weights yet."""
        return self._targets.mode if self._targets else self._asked

    @property
    def version(self) -> int:
        """The version that the modules use; 0 = their own weights."""
        return slots.version_of(self._bound.word)

    def __repr__(self) -> str:
        modules = ", ".join(type(module).__name__ for module in self._models.values())
        return f"Binding(modules=[{modules}], mode={self.mode!r}, version={self.version}, bound={self._open})"

    def refresh(self) -> int:
        """Switch now if there is news and no forward goes on; waits at most 100 ms for one. The version in use."""
        if self._open:
            self._gate.try_switch()
        self._subscriber.sweep_left()
        return self.version

    def follow(self) -> int:
        """As `refresh`, for who is awaited, on a thread that is none of the module's: the slot that was left is not
        looked at now, but by `Subscriber.answer` or at the next forward.

        What may be in a CUDA graph is left to its own thread, at its next forward: that may be capturing the graph now,
        and what other threads ask of the device then would spoil it.
        """
        if self._open and not (self._steady and self._streams is not None):
            self._gate.try_switch()
        return self.version

    @contextmanager
    def hold(self) -> Iterator[int]:
        """A block in which no switch happens, for `get_dist`, a critic or a backward pass; gives the version.

        Like a forward it begins on the newest version, unless this thread is inside one already.
        Contract: a switch waits for its end, and other threads' forwards that want one for at most 100 ms.
        """
        depth = self._gate.depth()
        try:
            self._enter()
            yield self.version
        finally:
            try:
                self._gate.leave(depth)
            except BaseException:  # as in `call`
                self._gate.leave(depth)
                raise
            if not depth:
                self._subscriber.sweep_left()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward through the gate."""
        if not self._open:
            return function(*args, **kwargs)
        gate = self._gate
        depth = gate.depth()
        try:
            if not self._enter():
                return function(*args, **kwargs)
            self._subscriber.ran()
            if self._at_entry is not None:
                self._at_entry(self.version)
            return privatize(function(*args, **kwargs), self._aliases)
        finally:
            try:
                gate.leave(depth)
            except BaseException:  # a signal handler's, at its very beginning: or this thread would be inside for ever
                gate.leave(depth)
                raise

    def _enter(self) -> bool:
        """As Gate.enter, and on devices in the order of the streams."""
        if self._streams is not None and device.torch_side.capturing():
            # What is queued now becomes part of a graph: a switch must not, and nothing in it may wait for what is not.
            return self._gate.enter(follow=False)
        outermost = self._gate.enter()
        if self._streams is not None:
            self._streams.entered()  # a nested one too: it may be on another stream
        return outermost

    def inside(self) -> bool:
        """Whether this thread is in the middle of a forward or a hold()."""
        return self._gate.depth() > 0

    def at_entry(self, action: Callable[[int], None] | None) -> None:
        """Call `action(version)` at the entry of every outermost forward, on its thread, after the switch."""
        self._at_entry = action

    def unbind(self) -> None:
        """Let the modules go, with the values that they show now in memory of their own. A second call does nothing.

        Contract: waits up to 10 s for other threads' forwards.
        """
        self._gate.exclusive(self._let_go)
        self._gate.disarm()

    def check(self, layout: Layout) -> None:
        """Raise LayoutMismatch or BindingError unless the modules can follow a channel of this layout."""
        Targets(layout, self._models, self._asked, self._steady)

    def leave(self) -> None:
        """Let the slot go, and go on with the values that the modules show, until the next switch.

        Raises WaitTimeout if other threads' forwards do not end within 10 s.
        """
        self._gate.exclusive(self._leave_channel, or_raise=True)

    def try_before_fork(self, seconds: float) -> bool:
        """Let no switch begin; False if one does not end in time."""
        return self._gate.try_before_fork(seconds)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._gate.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Its subscriber goes on in the child, and so does this."""
        self._gate.after_fork_in_child()

    def _let_go(self) -> None:
        if not self._open:
            return
        self._leave_slot()  # it may fail, for want of memory: then it is bound as before
        self._open = False
        for module in self._models.values():
            if binding_of(module) is self:
                del _bindings[id(module)]
            _take_gate(self, module)
        if self in self._subscriber._bindings:
            self._subscriber._bindings.remove(self)
        self._subscriber.wish()
        self._subscriber.unmap_retired()

    def _leave_slot(self) -> None:
        streams = self._streams
        try:
            if self._targets is not None and self._bound.word:
                if streams is not None:
                    streams.before_copying(streams.taken())
                self._targets.detach()
        finally:
            if streams is not None:
                streams.copied()
        for event in streams.taken() if streams is not None else ():
            event.synchronize()  # then nothing reads the slot any more
        self._aliases = Aliases()
        self._subscriber.release(self._bound)
        self._subscriber.wish()

    def _leave_channel(self) -> None:
        if not self._open:
            return
        self._leave_slot()
        self._targets = None  # another channel numbers its leaves otherwise

    def _take_over(self) -> None:
        """A module that is bound already moves to this binding."""
        with _registry_lock:
            for old in _overlapping(self._models):
                old.unbind()
            for module in self._models.values():
                forget = functools.partial(_forget, id(module))
                _bindings[id(module)] = weakref.ref(module, forget), weakref.ref(self)

    def _has_news(self) -> bool:
        return self._open and self._subscriber.has_news(self._bound.word)

    def _switch(self) -> None:
        if self._targets is None:
            self._resolve()
        if not torch.is_inference_mode_enabled():
            self._switch_now()
            return
        with torch.inference_mode(False):
            self._switch_now()

    def _switch_now(self) -> None:
        assert self._targets is not None
        switching.switch(self._subscriber, self._bound, self._targets.memories, self._point)

    def _point(self, views: Mapping[int, View]) -> list[device.Event]:
        """Point the modules there. When the events have come, nothing reads any more where they were before."""
        assert self._targets is not None
        self._targets.follow()
        self._look_after_streams()
        streams = self._streams
        if streams is None:
            self._aliases = self._targets.point(views)
            return []
        events = streams.taken()
        streams.before_copying(events)
        try:
            self._aliases = self._targets.point(views)
        finally:
            streams.copied()
        return events

    def _resolve(self) -> None:
        layout = self._subscriber.layout
        assert layout is not None
        self._targets = Targets(layout, self._models, self._asked, self._steady)
        self._look_after_streams()
        self._subscriber.wish()

    def _look_after_streams(self) -> None:
        """From when on the modules are on a device, what their forwards queue there counts."""
        devices = [memory for memory in self.memories if memory >= 0]
        if devices:
            self._streams = self._streams or ReaderStreams()
            self._streams.add(devices)

    @property
    def memories(self) -> frozenset[int]:
        """The memories that its modules are in; of none, while the channel has no weights yet."""
        return self._targets.memories if self._targets is not None else frozenset()


class GatedCall:
    """Stands in a module's instance dictionary in front of one of its methods. Copies and pickles come out unbound."""

    def __init__(self, binding: Binding, module: nn.Module, name: str) -> None:
        self.binding, self.name = binding, name
        self._module = weakref.ref(module)
        self._before = module.__dict__.get(name)
        self._method = getattr(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.binding.call(self._method, *args, **kwargs)

    def restore(self, module: nn.Module) -> None:
        """Take this wrapper off its module."""
        if self._before is None:
            del module.__dict__[self.name]
        else:
            module.__dict__[self.name] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        module = self._module()
        return getattr(memo.get(id(module), module), self.name)

    def __reduce__(self) -> Any:
        if self._before is not None:
            return _same, (self._before,)
        # While the module's state is being restored it has no instance attributes yet: this finds its class's method.
        return getattr, (self._module(), self.name)


def _same(value: Any) -> Any:
    return value


class GatedHooks(GatedCall):
    """In front of `_call_impl`, which runs the module's hooks around `forward`: they belong to the forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if module._forward_pre_hooks or module._forward_hooks:
            return self.binding.call(self._method, *args, **kwargs)
        return self._method(*args, **kwargs)


def _put_gate(binding: Binding, module: nn.Module) -> None:
    if module._compiled_call_impl is not None:
        # `module.compile()`: the gate goes around the compiled call, not into what is traced.
        module.__dict__["_compiled_call_impl"] = GatedCall(binding, module, "_compiled_call_impl")
        return
    module.__dict__["_call_impl"] = GatedHooks(binding, module, "_call_impl")
    module.__dict__["forward"] = GatedCall(binding, module, "forward")


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or CUDA graphs are in it."""
    names = ("OptimizedModule", "CudaGraphModule")
    return any(part._compiled_call_impl is not None or type(part).__name__ in names for part in module.modules())


def _take_gate(binding: Binding, module: nn.Module) -> None:
    for name in ("forward", "_call_impl", "_compiled_call_impl"):
        gated = module.__dict__.get(name)
        if isinstance(gated, GatedCall) and gated.binding is binding:
            gated.restore(module)


def bind(subscriber: Subscriber, modules: nn.Module | Mapping[str, nn.Module], mode: str = "auto") -> Binding:
    """Bind one module, or several by the names that they have in the channel."""
    models = {"": modules} if isinstance(modules, nn.Module) else dict(modules)
    for name, module in models.items():
        if not isinstance(module, nn.Module):
            raise BindingError(f"Expected an nn.Module to bind, got {type(module).__qualname__} - at {name!r}")
    return Binding(subscriber, models, mode)


def binding_of(module: nn.Module) -> Binding | None:
    """The binding that a module belongs to now."""
    known = _bindings.get(id(module))
    return known[1]() if known is not None and known[0]() is module else None


def _overlapping(models: Mapping[str, nn.Module]) -> list[Binding]:
    """The bindings of these modules and of their parts, which move to a new binding of them.

    Raises BindingError if a bound module has only some parts in common with them: two gates over one parameter could
    switch it in the middle of each other's forwards.
    """
    parts = {id(part) for module in models.values() for part in module.modules()}
    bound = [(module(), binding()) for module, binding in list(_bindings.values())]
    moving = [binding for module, binding in bound if binding is not None and id(module) in parts]
    for module, binding in bound:
        if module is None or binding is None or binding in moving:
            continue
        shared = [path or "itself" for path, part in module.named_modules() if id(part) in parts]
        if shared:
            raise BindingError(
                f"A {type(module).__qualname__} that is bound already shares `{shared[0]}` with the module to bind. "
                "Unbind that one first, or bind both in one call, so that they switch together"
            )
    return moving


def _forget(key: int, gone: weakref.ref[nn.Module]) -> None:
    if key in _bindings and _bindings[key][0] is gone:
        del _bindings[key]
