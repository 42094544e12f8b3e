"""The boundary around the monitor: what the monitor's code raises is reported once and never reaches the training.

torch, W&B and the user's code call into the monitor at entry points: hooks of tensors, modules and optimizers,
callbacks of the autograd engine, wrappers of clipping, scalers and `run.log`, and the methods of a Watcher. Each is
marked with `entry_point`, or, if it replaces a function of others, made with `around`. All other code of the monitor
runs below one of these.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, TypedDict, TypeVar, cast

from ._interruptions import raise_interruption

logger: Final = logging.getLogger("wandb_gradwatch")

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class CallbackError(Exception):
    """Wraps an exception that must reach the training loop, its `__cause__`: of a callback, or about bad arguments."""


@dataclass(frozen=True)
class RaisedToTheUser:
    """A context in which exceptions of this kind reach the training: it calls the user's code, or refuses something."""

    kind: type[Exception] = Exception

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, self.kind):
            raise CallbackError from error


class Boundary:
    """Gets the exceptions of the monitor's code: `failed` is called with the first one, and reports and stops.

    Several watchers have boundaries of their own, so that the others go on if one of them fails.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.stopped = False
        self._failed = failed

    def fail(self, error: Exception) -> None:
        """Stop and report an error, or raise it again if the user's signal handler has raised it."""
        raise_interruption(error)
        self.stopped = True
        try:
            self._failed(error)
        except CallbackError:
            raise
        except Exception as another:  # what failed may fail again while everything stops
            raise_interruption(another)
            logger.exception("wandb_gradwatch could not stop in good order; training goes on.")

    def caught(self, error: Exception) -> None:
        """Report an exception that has reached an entry point; raise it if it is meant for the training."""
        if isinstance(error.__context__, CallbackError):  # an entry point further inside has unwrapped it
            raise error
        try:
            if isinstance(error, CallbackError):
                raise error
            self.fail(error)
        except CallbackError as raised:
            raise raised.__cause__ or raised from None


def entry_point(
    otherwise: Callable[[], Any] = lambda: None,
) -> Callable[[Callable[Concatenate[Any, Arguments], Answer]], Callable[Concatenate[Any, Arguments], Answer]]:
    """Mark a method that others call: what it raises goes to its object's `_boundary`, and it returns `otherwise()`."""

    def decorate(
        method: Callable[Concatenate[Any, Arguments], Answer],
    ) -> Callable[Concatenate[Any, Arguments], Answer]:
        @functools.wraps(method)
        def enter(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._boundary.caught(error)
                return cast("Answer", otherwise())

        return enter

    return decorate


@dataclass(slots=True)
class Call:
    """A call of a function of others that the monitor has wrapped."""

    args: tuple[Any, ...]  # `before` may replace them
    kwargs: dict[str, Any]
    is_made: bool = False  # whether `before` has called the function already
    result: Any = None  # of a call that `before` has made
    found: Any = None  # what `before` leaves for `after`


class EntryPoints(TypedDict, total=False):
    """What `around` calls before a function of others, after it has returned, and when it has returned or raised."""

    before: Callable[[Call], None]
    after: Callable[[Call], None]
    at_exit: Callable[[Call], None]


def around(
    function: Callable[..., Any],
    *,
    before: Callable[[Call], None] | None = None,
    after: Callable[[Call], None] | None = None,
    at_exit: Callable[[Call], None] | None = None,
    replacement: "Replacement | None" = None,
) -> Callable[..., Any]:
    """Wrap a function of others between entry points. It is called exactly once, whatever these do.

    If the function raises, `after` is not called, and `at_exit` is. None is called while the replacement is off.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if replacement is not None and replacement.is_off:
            return function(*args, **kwargs)
        one = Call(args, kwargs)
        if before is not None:
            before(one)
        try:
            result = one.result if one.is_made else function(*one.args, **one.kwargs)
        finally:
            if at_exit is not None:
                at_exit(one)
        if after is not None:
            after(one)
        return result

    return call


class Replacement:
    """A function of others, an attribute of a module, a class or an object, to be replaced by a wrapper `around` it.

    Others may replace it too, before or after, and undo that in any order: what they have put around the wrapper stays
    when it is undone, and the wrapper in there does nothing from then on.

    Args:
        finish: gets the wrapper and returns the one to use.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[[Call], None] | None = None,
        after: Callable[[Call], None] | None = None,
        at_exit: Callable[[Call], None] | None = None,
        finish: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda wrapper: wrapper,
    ) -> None:
        self.is_off = False  # the wrapper only calls what it wraps
        self._owner, self._name = owner, name
        self._own = owner.__dict__.get(name)  # None: an object's method, or an inherited one
        function = getattr(owner, name)
        wrapper = around(function, before=before, after=after, at_exit=at_exit, replacement=self)
        self._wrapper = functools.wraps(function)(finish(wrapper))

    def install(self) -> None:
        """Put the wrapper in place. Record the replacement before, because Ctrl-C may come between any two calls."""
        setattr(self._owner, self._name, self._wrapper)

    @property
    def is_outermost(self) -> bool:
        """Whether the attribute is the wrapper: others have neither wrapped it nor put something else there."""
        return self._owner.__dict__.get(self._name) is self._wrapper

    def undo(self) -> None:
        """Put the original back, but where others have replaced the wrapper. Idempotent."""
        self.is_off = True
        if not self.is_outermost:
            return
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)
