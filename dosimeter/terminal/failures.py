"""The one place where whatever stops a command becomes a sentence on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from dosimeter.stopping import Stopped, stopping_on_signals

BAD_INPUT, INTERNAL_ERROR = 2, 70
SIGNAL_OFFSET = 128  # a command that a signal stops ends with this number plus the signal's
DEBUG_VARIABLE = "DOSIMETER_DEBUG"  # where it is set, a failure shows its traceback
EXIT_CODES = """exit codes:
  0    the command did its work
  1    a condition of --fail-on is met, or inspect found a sign
  2    the input is bad, or nothing measured what a condition asks for
  3    run: an error stopped the method, so nothing was measured
  70   an internal error: a defect of Dosimeter
  130  stopped by SIGINT (Ctrl-C); the same command resumes
  143  stopped by SIGTERM; the same command resumes"""


def carry_out(command: Callable[[], int], *, debug: bool = False, resumes: bool = False) -> int:
    """Run a command and return its exit code. `resumes`: the command writes records, so that it can be resumed."""
    try:
        with stopping_on_signals():
            code = command()
            sys.stdout.flush()
            return code
    except BaseException as error:
        if isinstance(error, GeneratorExit):
            raise
        if debug or os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        sentence, code = _explain(error, resumes)
        say(sentence)
        return code


def say(sentence: str) -> None:
    """One line on stderr, without control characters, whatever the sentence quotes."""
    line = "".join(letter if letter.isprintable() else " " for letter in f"dosimeter: {sentence}")
    try:
        sys.stderr.write(" ".join(line.split()) + "\n")
    except (OSError, ValueError):  # stderr is closed, too
        return


def _explain(error: BaseException, resumes: bool) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, Stopped) else signal.SIGINT
        resuming = "; what is done is saved, and the same command resumes" if resumes else ""
        return f"stopped by {signal.Signals(number).name}{resuming}", SIGNAL_OFFSET + number
    if isinstance(error, SystemExit):  # of a stranger's model or module; a command of ours returns its code
        return f"code that the configuration names ended the program (SystemExit: {_text(error)}), so nothing was measured", BAD_INPUT
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (Python flushes it once more when it ends)
        return "nobody reads the output any more", BAD_INPUT
    if _is_out_of_memory(error):
        return f"out of memory; a smaller batch, smaller images or fewer methods would need less: {_text(error)}", BAD_INPUT
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply: {_text(error)}", BAD_INPUT
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None), BAD_INPUT
    if isinstance(error, (ValueError, OSError)):
        return _text(error), BAD_INPUT
    if "torch" in sys.modules and _is_of_the_model(error):
        return f"the model failed in a pass through it: {_text(error).splitlines()[0]}", BAD_INPUT
    defect = f"an internal error, which is a defect of Dosimeter: {type(error).__name__}: {_text(error)}"
    return f"{defect}; --debug shows where; please report it", INTERNAL_ERROR


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from dosimeter.engines.matching.errors import is_out_of_memory

    return is_out_of_memory(error)


def _is_of_the_model(error: BaseException) -> bool:
    from dosimeter.network.probing import FAILED_MODEL

    return FAILED_MODEL in getattr(error, "__notes__", ())


def _text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
