"""Command lines and calls of the Python interface for `fuzz.py`, drawn at random from honest and odd pieces."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz_inputs import (
    AUDIT_TOML,
    SWEEP_TOML,
    damage_capture,
    damage_records,
    damage_toml,
    hostile_captures,
    hostile_npz,
    hostile_sweeps,
    hostile_weights,
    model,
    small_captures,
    small_decoders,
    small_npz,
    small_records,
    small_weights,
)
from torch import nn
from torch.nn.parameter import is_lazy

METHOD_CRASHED = 3  # exit code of `run`
QUESTIONS = (
    "SELECT * FROM records", "SELECT * FROM samples", "SELECT DATE '2020-01-01', INTERVAL 1 DAY, 'a'::BLOB, 1.5::DECIMAL(9, 2)", "SELEC",
    "SELECT [1, 2], {'a': 1}, MAP {1: 2}, NULL, 'nan'::FLOAT", "COPY records TO 'x.csv'", "SELECT * FROM 'x.csv'", "ATTACH 'x.db'", "\x00",
    "INSTALL httpfs", "SELECT read_text('/etc/passwd')", "SELECT getenv('HOME')", "PRAGMA version", "SELECT '\ud800'", "[/x]", "",
    "SELECT uuid(), now(), '1 day'::INTERVAL, TIME '10:00:00', 170141183460469231731687303715884105727::HUGEINT",
    "SELECT 'bold' AS \"[/x]\"",
)  # fmt: skip
QUICK_WORDS = ("data=digits", "data.batch_size=2", "data.auxiliary=4")
ODD_WORDS = (
    "data.name=no such set", "data.batch_size=0", "data.batch_size=10**9", "data.size=1000000000", "data.size=-1", "device=hpu",
    "device=cuda:99", "seed=1979-05-27", "labels=nothing", "labels=[]", "attack.steps=-3", "defenses=[{name='sign'}]", "loss=hinge",
    "data.normalization.std=[0.0]", "data.normalization.mean=[1.0, 2.0]", "model.name=os:system", "model.weights=/dev/zero", "=", "a.b.c=1",
    "data.name=\x00", "model.options=[", "training.steps=x", "data.sampler=unique", "data.auxiliary=-1", "model.classes=99999999999",
)  # fmt: skip


def command_line(rng: random.Random) -> tuple[list[str], dict[str, bytes]]:
    """The words of one command, with FILE and OUT for its paths, and its files."""
    kind = rng.choice(
        (
            "run",
            "run",
            "audit",
            "inspect",
            "report",
            "list",
            "reproduce",
            "generator",
            "words",
            "sweep",
            "ask",
            "capture",
            "received",
            "decoder",
        )
    )
    odd = rng.sample(ODD_WORDS, rng.choice((0, 1, 1, 2)))
    if kind == "run":
        method = rng.choice(("labels=idlg", "labels=rlg", "labels=ilrg", "attack={name='dlg', steps=2}", "features=subspace"))
        out = rng.choice(([], ["--out", "OUT"], ["--out", "OUT[/x]"], ["--out", "FILE"]))
        return ["run", method, *QUICK_WORDS, *odd, *out, *rng.choice(([], ["--json"]))], {"x": b"x"}
    if kind == "audit":
        content = damage_toml(AUDIT_TOML, rng)
        words = ["FILE", 'labels=["idlg"]', "attacks=[]", "features=[]", *odd]
        gate = rng.choice(([], ["--fail-on", "leaked"], ["--fail-on", "inputs.psnr.median > 20"], ["--fail-on", "x"]))
        return ["audit", *words, "--out", "OUT", *gate], {"audit.toml": content}
    if kind == "inspect":
        files = dict(rng.choice([*small_weights(), *hostile_weights()[:12]]))
        return ["inspect", rng.choice(("lenet5", "FILE", "os:system")), "--reference", "FILE", *odd], files
    if kind == "report":
        form = rng.choice(([], ["--format", "markdown"], ["--json"]))
        return ["report", "FOLDER", *form], {"records.jsonl": damage_records(small_records()[0]["records.jsonl"], rng)}
    if kind == "ask":
        words = ["ask", "FOLDER", rng.choice(QUESTIONS), *rng.choice(([], ["--json"]))]
        honest = small_records()[0]["records.jsonl"]
        return words, {"records.jsonl": rng.choice((honest, honest, damage_records(honest, rng)))}
    if kind == "sweep":  # what has experiments to do starts processes, and is left to the tests
        files = rng.choice((*hostile_sweeps(), *({"sweep.toml": damage_toml(SWEEP_TOML, rng)} for _ in range(20))))
        return ["sweep", "FILE", "models=['no such model']", *odd, "--workers", rng.choice(("1", "0", "-1")), "--out", "OUT"], files
    if kind == "capture":
        return ["capture", "show", rng.choice(("FILE", "FOLDER")), *rng.choice(([], ["--json"]))], _capture(rng)
    if kind == "received":
        files = dict(rng.choice([*small_weights(), *hostile_weights()[:12]]))
        files["truth.npz"] = rng.choice([*small_npz(), *hostile_npz()[:5]])["set.npz"]
        before = {"before.safetensors": small_weights()[0]["weights.safetensors"]}
        words = ["audit", *rng.choice((["model=fcn3"], [])), 'labels=["idlg"]', "attacks=[]", "features=[]", *odd, "--out", "OUT"]
        sent = rng.choice((["--before", "BESIDE/before.safetensors", "--after", "FILE"], ["--capture", "FILE"], ["--capture", "FOLDER"]))
        return [*words, *sent, *rng.choice(([], ["--truth", "BESIDE/truth.npz"]))], {**files, **before, **_capture(rng)}
    if kind == "decoder":
        words = ["run", "attack={name='rgla', width=2, epochs=1, features='subspace', decoder='FILE'}", "labels=idlg", *QUICK_WORDS, *odd]
        return words, dict(rng.choice(small_decoders()))
    if kind == "list":
        return ["list", *rng.choice(([], ["labels"], ["nothing"], ["--json"]))], {"x": b"x"}
    if kind == "reproduce":
        return ["reproduce", rng.choice(("FILE", "no/table", "\x00", "..")), "--quick", "--out", "OUT"], {
            "table.toml": damage_toml(AUDIT_TOML, rng)
        }
    if kind == "generator":
        return ["generator", "train", "FILE", *odd, "decoder.width=4", "--max-seconds", "2", "--out", "OUT/x"], {
            "audit.toml": damage_toml(AUDIT_TOML, rng)
        }
    words = ["run", "report", "--json", "--out", "OUT", "FILE", "-x", "--", "", "\x00", "--help", "a=b", "é", "--version"]
    return rng.sample(words, rng.choice((1, 2, 3))), dict(rng.choice([*small_npz(), *hostile_npz()[:5]]))


def _capture(rng: random.Random) -> dict[str, bytes]:
    files = dict(rng.choice([*small_captures(), *small_captures(), *hostile_captures()]))
    first = next(iter(files))
    return files | ({first: damage_capture(files[first], rng)} if rng.random() < 0.5 and first in small_captures()[0] else {})


def run_command(words: list[str], path: Path) -> None:
    """Run the command line in this process. An exit code is an answer, unless it stands for a defect or a crashed method."""
    from dosimeter.cli import main
    from dosimeter.terminal.failures import INTERNAL_ERROR

    places = {"FILE": str(path), "FOLDER": str(path.parent), "BESIDE": str(path.parent), "OUT": str(path.parent / "out")}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main([re.sub("|".join(places), lambda found: places[found[0]], word) for word in words])
    if code in (METHOD_CRASHED, INTERNAL_ERROR):
        raise AssertionError(f"exit code {code}: {said.getvalue()[-150:]}")


class _Strange(nn.Sequential):
    """A model whose outputs are changed at the end, or one that fails after so many passes."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] | None, passes: int = 0) -> None:
        super().__init__(nn.Flatten(), nn.Linear(48, 5))
        self.change, self.passes = change, passes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.passes -= 1
        if self.change is None and self.passes < 0:
            raise KeyError("later")
        logits = super().forward(input)
        return logits if self.change is None else self.change(logits)


def _net(rng: random.Random) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nets: list[Callable[[], nn.Module]] = [
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 5)),
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5, bias=False)),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 1)),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Softmax(1)),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).half(),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).double(),
            lambda: nn.DataParallel(nn.Sequential(nn.Flatten(), nn.Linear(48, 5))),
            lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(48, 5))),  # pyright: ignore[reportReturnType]
            lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(5)),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5, device="meta")),
            lambda: nn.Sequential(),
            lambda: nn.LSTM(4, 5),
            lambda: _Strange(lambda logits: logits.to_sparse()),
            lambda: _Strange(lambda logits: logits.to("meta")),
            lambda: _Strange(lambda logits: torch.nested.nested_tensor(list(logits))),
            lambda: _Strange(None, passes=rng.randrange(12)),
        ]
        weights = [24, 12, 4, 4] + [1] * (len(nets) - 4)
        return rng.choices(nets, weights)[0]().train(rng.random() < 0.3)


def _batch(rng: random.Random) -> Any:
    import dosimeter as dm

    torch.manual_seed(rng.randrange(100))
    size = rng.choice((1, 2, 3, 6))
    inputs = torch.rand(size, 3, 4, 4)
    targets: Any = torch.randint(0, 5, (size,))
    changes: list[Callable[[], Any]] = [
        lambda: dm.Batch(inputs * 1e30, targets),
        lambda: dm.Batch(inputs * 1e-30, targets),
        lambda: dm.Batch(inputs * 3e38, targets),
        lambda: dm.Batch(torch.zeros_like(inputs), targets),
        lambda: dm.Batch(inputs.half(), targets),
        lambda: dm.Batch(inputs.double(), targets),
        lambda: dm.Batch(inputs.to(torch.complex64), targets),
        lambda: dm.Batch(inputs.to_sparse(), targets),
        lambda: dm.Batch(inputs[:0], targets[:0]),
        lambda: dm.Batch(inputs, targets - 1),
        lambda: dm.Batch(inputs, targets + 2**40),
        lambda: dm.Batch(inputs, targets.float()),
        lambda: dm.Batch(inputs, targets.bool()),
        lambda: dm.Batch(inputs, torch.rand(size, 5).softmax(1)),
        lambda: dm.Batch(inputs, torch.zeros(size, 5)),
        lambda: dm.Batch(inputs[0], targets),
        lambda: dm.Batch(inputs.clone().fill_(float("nan")), targets),
        lambda: dm.Batch(inputs.expand(size, 3, 4, 4).transpose(2, 3), targets),
        lambda: (inputs, targets),
        lambda: None,
    ]
    return dm.Batch(inputs, targets) if rng.random() < 0.8 else rng.choice(changes)()


def _exposure(rng: random.Random) -> Any:
    import dosimeter as dm

    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options = dict(
            rng.sample(
                [
                    ("defenses", rng.choice([("sign",), ("gaussian_noise",), "nothing", 3, [None], (dm.defense("pruning", ratio=0.5),)])),
                    ("training", rng.choice([dm.FedAvg(steps=2), "fedsgd", "x", 3, None])),
                    ("loss", rng.choice(["focal", "binary_cross_entropy", "x", 3, None, dm.CrossEntropy(smoothing=0.1)])),
                    ("normalization", rng.choice([dm.Normalization(std=(0.0,)), dm.Normalization(mean=(0.5,) * 3, std=(0.5,) * 3), 3])),
                    ("auxiliary", rng.choice([_batch(rng), 3, None])),
                    ("seed", rng.choice([0, -1, 2**70, "x", None, 1.5])),
                    ("declare_batch_size", rng.choice([True, False, 3])),
                ],
                rng.choice((1, 2)),
            )
        )
    net, batch = _net(rng), _batch(rng)
    exposure = dm.observe(net, batch, **options)
    if rng.random() < 0.3:
        kinds: list[Callable[[Any], Any]] = [
            lambda t: t.half(), lambda t: t.double(), lambda t: t * 1e30, lambda t: t * 0, lambda t: t.int(), lambda t: t[:1], lambda t: 3,
        ]  # fmt: skip
        change = rng.choice(kinds)
        shape = rng.choice([(3, 4, 4), (3, 4, 4), (0,), (3, 4), "x", (10**9, 4)])
        update = {name: change(tensor) for name, tensor in exposure.update.items()}
        exposure = dm.receive(net, update, input_shape=shape, batch_size=rng.choice([None, 2, -1, 10**9]))
    return exposure


def _labels(rng: random.Random, exposure: Any) -> Any:
    import dosimeter as dm

    size = min(exposure.public.batch_size or 2, 9)
    return rng.choice(
        [
            None,
            torch.randint(0, 5, (size,)),
            torch.randint(-1, 5, (size,)),
            torch.randint(0, 5, (size + 1,)),
            torch.rand(size, 5).softmax(1),
            torch.tensor(3),
            torch.tensor([99]),
            dm.LabelEstimate(counts=torch.ones(3, dtype=torch.int64), labels=torch.arange(3)),
            dm.LabelEstimate(counts=torch.zeros(5, dtype=torch.int64), labels=torch.arange(0)),
            "x",
        ]
    )


def _recover_labels(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    names = [
        "idlg",
        "ilrg",
        "rlg",
        "zlg",
        "llg",
        "llg_plus",
        "llg_star",
        "posterior",
        "gradinversion",
        "subspace",
        "gradient_bridge",
        "x",
        3,
    ]
    dm.recover_labels(_exposure(rng), rng.choice(names), **rng.choice([{}, {}, {"nothing": 1}, {"seed": rng.choice([0, "x", 2**70])}]))


def _recover_features(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    exposure = _exposure(rng)
    name = rng.choice(["subspace", "quotient", "rgla", "scalar", "x"])
    options = {"steps": 20} if name == "rgla" else rng.choice([{}, {}, {"attempts": -1}, {"nothing": 1}])
    found = dm.recover_features(exposure, name, labels=_labels(rng, exposure), **options)
    dm.score(found, _batch(rng), exposure=exposure)


def _reconstruct(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    exposure = _exposure(rng)
    name = rng.choice(["dlg", "inverting_gradients", "sapag", "linear_recursion", "gradinversion", "stepwise", "imprint", "x"])
    options = {"steps": rng.choice([1, 2, 0, -1, "x"])} if name not in ("linear_recursion", "x", "imprint") else {}
    dm.score(dm.reconstruct(exposure, name, labels=_labels(rng, exposure), **options), _batch(rng))


def _inspect(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    dm.inspect(_net(rng), batch=_batch(rng))


def _recover_maps(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    dm.recover_maps(_exposure(rng), rng.choice([None, "0", "x", 3]))


def _audit(rng: random.Random, path: Path) -> None:
    import dosimeter as dm

    methods = {"labels": rng.choice([["idlg"], "x", [], 3]), "features": [], "attacks": rng.choice([[], "x"])}
    out = rng.choice([None, path.parent / "out", path, "\x00"])
    dm.audit(_net(rng), _batch(rng), out=out, **methods, **rng.choice([{}, {"foreign": 3}, {"budget": "x"}, {"seed": 1.5}]))


def _load_images(rng: random.Random, path: Path) -> None:
    from dosimeter.data.load import load_images

    options = rng.choice([{}, {"size": 10**9}, {"size": -1}, {"part": "x"}, {"channels": 7}, {"size": "x"}, {"crops": 10**9}])
    load_images(rng.choice(["digits", "photographs", "x", "\x00", "/dev/zero", "/proc/self/mem", path, path.parent, 3, ""]), **options)


def _test_membership(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    found = dm.test_membership(_exposure(rng), _batch(rng))
    found.bound(rng.choice([0.1, 0, 1, -1, 2.0, float("nan"), "x"]))


def _ceilings(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    noise = dm.defense("gaussian_noise", std=0.1)
    options = rng.choice(
        [
            {},
            {},
            {"bounds": rng.choice([["hidden_directions"], ["x"], [], 3, "x"])},
            {"defenses": rng.choice([(dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.0),), (noise,), ("gaussian_noise",), [None]])},
            {"defenses": (noise,)},
            {"training": rng.choice([dm.FedAvg(steps=2), "x", 3])},
            {"loss": rng.choice(["focal", "x", 3])},
            {"seed": rng.choice([-1, "x", 2**70])},
            {"auxiliary": rng.choice([_batch(rng), 3])},
        ]
    )
    repr(dm.ceilings(_net(rng), _batch(rng), **options))


def _read(rng: random.Random, path: Path) -> None:
    import dosimeter as dm

    (path.parent / "records.jsonl").write_bytes(damage_records(small_records()[0]["records.jsonl"], rng))
    place = rng.choice([path.parent, path.parent, str(path.parent), path.parent / "records.jsonl", path, "\x00", 3, None, "/dev/zero", ""])
    found = dm.read(place)
    repr(found), found._repr_html_(), found.save(path.parent / "out")


def _captures(rng: random.Random, path: Path) -> None:
    import dosimeter as dm

    facts = {
        "kind": rng.choice(["weights", "gradient", "difference", "x", 3]),
        "round": rng.choice([1, -1, "x", None]),
        "client": rng.choice(["a", "\x00", "a/../b", 3, "a" * 500]),
        "batch_size": rng.choice([2, -1, "x", None]),
        "training": rng.choice([dm.FedAvg(steps=2), "fedsgd", "x", 3, None]),
        "input_shape": rng.choice([(3, 2, 2), "x", (), None]),
        "framework": rng.choice(["by hand", 3]),
    }
    chosen = {name: facts[name] for name in rng.sample(list(facts), rng.choice((0, 1, 3)))} | {"kind": facts["kind"]}
    state = model().state_dict()
    sent = rng.choice([state, {}, 3, {"x": 3}, {name: tensor.numpy() for name, tensor in state.items()}, {3: torch.zeros(2)}])
    written = dm.write_capture(
        rng.choice([path.parent, path.parent / "new", path, "\x00"]), sent, before=rng.choice([state, None, 3]), **chosen
    )
    capture = dm.read_capture(rng.choice([written, path.parent, path]))
    dm.aggregate(rng.choice([[capture, capture], [capture], [], 3, [capture, 3]]))
    dm.dose(rng.choice([[capture.receive(model())], [], [3], 3]))


def _preflight(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    net = _net(rng)
    scale = rng.choice([0.0, 1e-3, 1e30, float("nan")])
    known = {name: tensor for name, tensor in net.state_dict().items() if not is_lazy(tensor)}
    update: Any = {name: torch.rand_like(tensor.float()) * scale for name, tensor in known.items()}
    update = rng.choice([update, update, update, {}, 3, dict(list(update.items())[:1])])
    options = {"kind": rng.choice(["weights", "gradient", "difference", "x"]), "input_shape": rng.choice([(3, 4, 4), None, "x", (-1,)])}
    options |= {"batch_size": rng.choice([None, 2, 0, "x"]), "training": rng.choice([None, dm.FedAvg(steps=2), "x"])}
    str(dm.preflight(net, update, **options))


def _recover_targets(rng: random.Random, _: Path) -> None:
    import dosimeter as dm

    exposure = _exposure(rng)
    rng.choice([dm.recover_targets, dm.recover_tokens])(exposure, rng.choice(["head_slopes", "dager", "embedding_rows", "x", 3]))
    dm.identifiability(exposure)


CALLS: tuple[tuple[str, Callable[[random.Random, Path], None]], ...] = (
    ("recover_labels", _recover_labels),
    ("recover_features", _recover_features),
    ("reconstruct", _reconstruct),
    ("inspect", _inspect),
    ("recover_maps", _recover_maps),
    ("audit", _audit),
    ("load_images", _load_images),
    ("test_membership", _test_membership),
    ("ceilings", _ceilings),
    ("read", _read),
    ("captures", _captures),
    ("preflight", _preflight),
    ("recover_targets", _recover_targets),
)
