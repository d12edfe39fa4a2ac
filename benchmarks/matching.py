"""How long one gradient-matching step takes, against plain eager double backward and one ordinary training step, in one run.

    python benchmarks/matching.py                     GPU: ResNet-34, batch 8, 224 px; tf32, bf16 and fp32
    python benchmarks/matching.py --growth            GPU: how the step grows with the batch and with the pixels
    python benchmarks/matching.py --captured          GPU: nothing is compiled; layers compared one by one and laid end to end
    python benchmarks/matching.py --check lenet5      do eager, functional, captured and compiled agree? also vgg11, resnet18
    python benchmarks/matching.py --device cpu        CPU: LeNet on CIFAR-sized inputs, batch 8: eager, functional, compiled

Needs torch and this repository alone. `--out FILE` writes the numbers as JSON. `--wait FILE` compiles, writes FILE.ready, and times once
FILE is there: so programs can compile side by side and be timed alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dosimeter as dm
from dosimeter.engines.matching.compiled import Captured, Compiled, precision
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.paths import Eager, Evaluator, Functional
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.problem import Problem, make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.state import State, begin, keep_best, move
from dosimeter.engines.matching.terms import TermSchedule
from dosimeter.registry import MODELS


@dataclass
class Run:
    """One attack in the middle: what it solves, where it stands, and how it evaluates."""

    problem: Problem
    state: State
    schedule: TermSchedule
    evaluate: Evaluator
    rng: torch.Generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default=None, help="resnet34 on a GPU, lenet_dlg on a CPU")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=None, help="224 on a GPU, 32 on a CPU")
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16", "fp32"], choices=("tf32", "bf16", "fp32"))
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--check", default=None, metavar="MODEL")
    parser.add_argument("--paths", nargs="+", default=["functional", "captured", "compiled"], help="what --check compares with eager")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--wait", default=None, metavar="FILE")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    options.model = options.model or ("resnet34" if on_gpu else "lenet_dlg")
    options.pixels = options.pixels or (224 if on_gpu else 32)
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {options.threads} threads"
    print(f"PyTorch {torch.__version__}, {name}", flush=True)
    if options.check:
        rows = check(options)
    elif options.captured:
        rows = [captured_alone(options, wanted) for wanted in options.precisions]
    else:
        rows = growth(options) if options.growth else on_a_gpu(options) if on_gpu else on_a_cpu(options)
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1))


def on_a_gpu(options: argparse.Namespace) -> list[dict]:
    print(f"{options.model}, batch {options.batch}, {options.pixels} px", flush=True)
    rows, reference = [], None
    for wanted in options.precisions:
        row = measured(options, options.batch, options.pixels, wanted)
        rows.append(row)
        reference = reference or row
        show(row)
        print(
            f"  {wanted}: {row['plain ms'] / row['step ms']:.1f} times faster than plain eager double backward, "
            f"{row['step ms'] / row['training ms']:.2f} of one ordinary training step",
            flush=True,
        )
    exact = next((row for row in rows if row["precision"] == "fp32"), None)
    for row in rows if exact else []:
        print(
            f"  {row['precision']}: objective {row['objective']:.7f}, {row['objective'] - exact['objective']:+.1e} against fp32", flush=True
        )
    return rows


def growth(options: argparse.Namespace) -> list[dict]:
    rows = []
    for batch, pixels in ((8, 64), (8, 112), (8, 224), (1, 224), (32, 224)):
        rows.append(measured(options, batch, pixels, options.precisions[0]))
        show(rows[-1])
    return rows


def measured(options: argparse.Namespace, batch: int, pixels: int, wanted: str) -> dict:
    """One configuration: the compiled step, and the captured and plain ones and a training step in the same run."""
    torch.compiler.reset()
    run = prepared(options, batch, pixels, wanted)
    row: dict = {"model": options.model, "batch": batch, "pixels": pixels, "precision": wanted}
    with precision(wanted):
        run.evaluate = compiled = Compiled(run.problem.objective)
        torch.cuda.reset_peak_memory_stats()  # before the recording: what a graph works in is not counted while it is replayed
        began = time.perf_counter()
        evaluated(run)
        torch.cuda.synchronize()
        row["first step s"] = time.perf_counter() - began
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        if options.wait:
            wait_for(Path(options.wait))
        row["step ms"] = timed(attack_step(run))
        row["evaluation ms"] = timed(lambda: evaluated(run))
        row["training ms"] = timed(training_step(run))
        row["plain ms"] = timed(plain_step(run), repeats=10)
        run.state.variables = torch.linspace(0, 1, run.state.variables.numel(), device=run.problem.device).reshape(
            run.state.variables.shape
        )
        row["objective"] = float(evaluated(run).objective)
        slope = evaluated(run).inputs.clone()
        run.evaluate = Captured(run.problem.objective)
        row["slope's relative difference from captured"] = float((evaluated(run).inputs - slope).norm() / slope.norm())
        row["captured ms"] = timed(attack_step(run))
        run.evaluate = compiled
    return row


def captured_alone(options: argparse.Namespace, wanted: str) -> dict:
    """The captured step with layers compared one by one and laid end to end, and the plain one, in one run."""
    row: dict = {"model": options.model, "batch": options.batch, "pixels": options.pixels, "precision": wanted}
    with precision(wanted):
        for name, end_to_end in (("layer by layer ms", False), ("end to end ms", True)):
            run = prepared(options, options.batch, options.pixels, wanted)
            run.evaluate = Captured(run.problem.objective)
            run.evaluate.fuses_sums = not end_to_end
            row[name] = timed(attack_step(run))
            row[name.replace("ms", "objective")] = float(evaluated(run).objective)
        row["plain ms"] = timed(plain_step(run), repeats=10)
    show(row)
    return row


def wait_for(file: Path) -> None:
    file.with_name(file.name + ".ready").touch()
    while not file.exists():
        time.sleep(0.1)


def on_a_cpu(options: argparse.Namespace) -> list[dict]:
    """Eager, functional and compiled, side by side and interleaved, with what a step costs before any arithmetic."""
    torch.set_num_threads(options.threads)
    rows = []
    for batch in (1, options.batch):
        run = prepared(options, batch, options.pixels, "fp32")
        paths: dict[str, Evaluator] = {"eager": Eager(run.problem.objective), "functional": Functional(run.problem.objective)}
        try:
            compiled = Compiled(run.problem.objective)
            began = time.perf_counter()
            run.evaluate = compiled
            evaluated(run)
            print(f"batch {batch}: compiled in {time.perf_counter() - began:.0f} s", flush=True)
            paths["compiled"] = compiled
        except Exception as error:
            print(f"batch {batch}: cannot be compiled here: {str(error).splitlines()[0]}", flush=True)
        step = partial(evaluated, run)
        times: dict[str, list[float]] = {name: [] for name in ["plain", *paths]}
        plain = plain_step(run)
        for _ in range(40):
            times["plain"].append(stopwatch(plain))
            for name, path in paths.items():
                run.evaluate = path
                times[name].append(stopwatch(step))
        for name, values in times.items():
            if name in paths:
                run.evaluate = paths[name]
            count = operations(plain if name == "plain" else step) if name != "compiled" else None
            rows.append({"path": name, "batch": batch, "ms": median(values), "operations": count})
            dispatched = "" if count is None else f", {count} dispatched operations"
            print(f"batch {batch}: {name} {median(values):.2f} ms{dispatched}", flush=True)
    for name in ("plain", "eager", "functional", "compiled"):
        pair = {row["batch"]: row["ms"] for row in rows if row["path"] == name}
        if len(pair) == 2:
            slope = (pair[options.batch] - pair[1]) / (options.batch - 1)
            print(f"{name}: {pair[1] - slope:.2f} ms a step before the first sample (dispatch), {slope:.2f} ms a sample", flush=True)
    return rows


def check(options: argparse.Namespace) -> list[dict]:
    """The largest relative difference of objective and input gradient from plain eager double backward."""
    rows = []
    for train in (False, True):
        for training in (dm.FedSGD(), dm.FedAvg(steps=3, learning_rate=0.1)):
            for dtype in (torch.float64, torch.float32):
                torch.compiler.reset()
                torch.manual_seed(0)
                model = MODELS.build(options.check).to(options.device, dtype).train(train)
                batch = dm.Batch(
                    torch.rand(4, 3, 32, 32, device=options.device, dtype=dtype), torch.randint(0, 10, (4,), device=options.device)
                )
                exposure = dm.observe(model, batch, training=training)
                recipe = Recipe(distance=Cosine(), optimiser=Adam(), rate=Rate(start=0.1), steps=1, priors=(TotalVariation(weight=0.1),))
                estimate = dm.LabelEstimate(counts=torch.bincount(batch.targets, minlength=10), labels=batch.targets)
                run = started(exposure, estimate, recipe, options.device)
                found = {}
                compared = [path for path in (Functional, Captured, Compiled) if path.__name__.lower() in options.paths]
                for path in (Eager, *compared):
                    run.evaluate = path(run.problem.objective)
                    torch.manual_seed(0)
                    with precision("fp32"):
                        found[path] = evaluated(run)
                for path in compared:
                    eager, other = found[Eager], found[path]
                    pairs = ((eager.objective, other.objective), (eager.inputs, other.inputs))
                    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
                    mode, kind = "train" if train else "eval", str(dtype).removeprefix("torch.")
                    row = {"model": options.check, "mode": mode, "training": training.name, "dtype": kind}
                    rows.append(row | {"path": path.__name__, "error": error})
                    verdict = "agrees" if error < (1e-10 if dtype == torch.float64 else 1e-4) else "DIFFERS"
                    print(f"  {options.check} {mode} {training.name} {kind} {path.__name__}: {error:.1e} {verdict}", flush=True)
    return rows


def prepared(options: argparse.Namespace, batch: int, pixels: int, wanted: str) -> Run:
    torch.manual_seed(0)
    imagenet = {"classes": 1000, "stem": "imagenet"} if options.model.startswith("resnet") else {}
    model = MODELS.build(options.model, size=pixels, **imagenet).eval().to(options.device)
    inputs = torch.rand(batch, 3, pixels, pixels, device=options.device)
    labels = torch.randint(0, 10, (batch,), device=options.device)
    exposure = dm.observe(model, dm.Batch(inputs, labels))
    recipe = Recipe(
        distance=Cosine(),
        optimiser=Adam(sign="signed"),
        rate=Rate(start=1e-6),
        steps=1000,
        priors=(TotalVariation(weight=0.1),),
        precision=wanted,  # pyright: ignore[reportArgumentType]
    )
    estimate = dm.LabelEstimate(counts=torch.bincount(labels, minlength=10), labels=labels)
    return started(exposure, estimate, recipe, options.device)


def started(exposure: dm.Exposure, labels: dm.LabelEstimate, recipe: Recipe, device: str) -> Run:
    rng = torch.Generator(device).manual_seed(0)
    problem = make_problem(exposure, labels, recipe)
    state = begin(problem, rng)
    state.memory = recipe.optimiser.start(state.variables)
    return Run(problem, state, TermSchedule(problem), Eager(problem.objective), rng)


def evaluated(run: Run):
    names, terms = run.schedule.at(0.5, run.rng, one_layer_set=run.evaluate.one_layer_set)
    return run.evaluate(*run.problem.guess.unpack(run.state.variables), names, terms)


def attack_step(run: Run) -> Callable[[], None]:
    """Everything that one step of an attack does."""

    def step() -> None:
        evaluation = evaluated(run)
        keep_best(run.state, run.problem.recipe, evaluation)
        move(run.state, run.problem, evaluation)

    return step


def plain_step(run: Run) -> Callable[[], None]:
    """What every public toolkit does: eager double backward in the model's own layout."""
    exposure, targets = run.problem.exposure, run.problem.guess.targets
    model, parameters = exposure.model, list(exposure.model.parameters())
    update = [exposure.update[name] for name, _ in model.named_parameters()]
    guess = run.problem.guess.unpack(run.state.variables)[0][0].clone().requires_grad_()
    bf16 = run.problem.recipe.precision == "bf16"

    def step() -> None:
        with torch.autocast(guess.device.type, torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(guess), targets)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        gradients = [gradient.float() for gradient in gradients]
        agreement = sum((g * u).sum() for g, u in zip(gradients, update))
        sizes = sum(g.square().sum() for g in gradients).sqrt() * sum(u.square().sum() for u in update).sqrt()
        variation = guess.diff(dim=2).abs().mean() + guess.diff(dim=3).abs().mean()
        torch.autograd.grad(1 - agreement / sizes + 0.1 * variation, guess)

    return step


def training_step(run: Run) -> Callable[[], None]:
    """One ordinary gradient of the loss at the parameters."""
    model, parameters = run.problem.exposure.model, list(run.problem.exposure.model.parameters())
    inputs = run.problem.guess.unpack(run.state.variables)[0][0].clone()
    bf16 = run.problem.recipe.precision == "bf16"

    def step() -> None:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(inputs), run.problem.guess.targets)
        torch.autograd.grad(loss, parameters)

    return step


def timed(step: Callable[[], object], repeats: int = 30, warm: int = 5) -> float:
    """The median in milliseconds, by CUDA events."""
    for _ in range(warm):
        step()
    times = []
    for _ in range(repeats):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        step()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return median(times)


def stopwatch(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def operations(step: Callable[[], object]) -> int:
    """How many operations one step hands to the dispatcher."""

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.count += 1
            return function(*arguments, **(keywords or {}))

    with Counter() as counter:
        step()
    return counter.count


def show(row: dict) -> None:
    print("  " + ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
