"""Every way to the numbers gives the same numbers, and what cannot be differentiated ends in an outcome."""

import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.engines.matching.choice import Measured, WithFallback, choose, reason_against_batching
from dosimeter.engines.matching.compiled import Captured, Compiled
from dosimeter.engines.matching.distances import Cosine, SquaredError
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.paths import Eager, Evaluation, Functional
from dosimeter.engines.matching.priors import TotalVariation, batch_norm_prior
from dosimeter.engines.matching.problem import problem_under
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.state import begin


class Residual(nn.Module):
    """Batch norm, an in-place ReLU, an in-place sum: what residual networks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second, self.second_norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        early = self.relu(self.first_norm(self.first(x)))
        late = self.second_norm(self.second(early))
        late += early
        return self.head(self.relu(late).mean((2, 3)))


def seeded(build: type[nn.Module] | object, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()  # pyright: ignore[reportCallIssue]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(dtype: torch.dtype = torch.float64) -> dm.Batch:
    return dm.Batch(numbers(3, 3, 8, 8).to(dtype), torch.tensor([0, 3, 4]))


def recipe(**changes) -> Recipe:
    return Recipe(**({"distance": Cosine(), "optimiser": Adam(), "rate": Rate(start=0.1), "steps": 10} | changes))


def evaluated(path: type, exposure: dm.Exposure, made: Recipe, restarts: int, **settings) -> Evaluation:
    objective = Objective(exposure, made, None)
    like = next(iter(exposure.update.values()))
    inputs, logits = numbers(restarts, 3, 3, 8, 8, seed=1).to(like), numbers(restarts, 3, 5, seed=2).to(like)
    terms = Terms(matching=like.new_ones(()), priors=like.new_tensor([prior.weight for prior in made.priors]), **settings)
    return path(objective)(inputs, logits, objective.names, terms)


def largest_error(one: Evaluation, other: Evaluation) -> float:
    pairs = [(one.objective, other.objective), (one.distance, other.distance), (one.inputs, other.inputs), (one.logits, other.logits)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs if a is not None and b is not None)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("training", [dm.FedSGD(), dm.FedAvg(steps=3, learning_rate=0.1, momentum=0.5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_functional_form_and_eager_double_backward_agree(train, training, dtype, tolerance) -> None:
    model = seeded(Residual).to(dtype).train(train)
    exposure = dm.observe(model, batch(dtype), training=training)
    made = recipe(priors=(TotalVariation(weight=0.1), batch_norm_prior(model, weight=1e-3, leading=(10.0,))))
    assert largest_error(evaluated(Eager, exposure, made, 1), evaluated(Functional, exposure, made, 1)) < tolerance


def test_the_eager_numbers_are_those_of_finite_differences() -> None:
    exposure = dm.observe(seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 5)), 1).double(), batch())
    objective = Objective(exposure, recipe(distance=SquaredError()), None)
    inputs, logits = numbers(1, 3, 3, 8, 8, seed=1), numbers(1, 3, 5, seed=2)
    terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_zeros(0))
    found = Eager(objective)(inputs, logits, objective.names, terms)
    direction = numbers(1, 3, 3, 8, 8, seed=3) - 0.5
    ahead, behind = (Eager(objective)(inputs + sign * 1e-5 * direction, logits, objective.names, terms).objective for sign in (1, -1))
    assert float((found.inputs * direction).sum()) == pytest.approx(float((ahead - behind) / 2e-5), rel=1e-6)


def test_restarts_side_by_side_have_the_gradients_of_each_alone_where_batching_is_called_exact() -> None:
    exposure = dm.observe(seeded(Residual).double().eval(), batch())
    made = recipe(restarts=3)
    problem = problem_under(exposure, batch().targets, made)
    start = begin(problem, torch.Generator().manual_seed(0)).variables
    assert reason_against_batching(problem, start) == ""
    assert largest_error(evaluated(Eager, exposure, made, 3), evaluated(Functional, exposure, made, 3)) < 1e-10


class LayerNormed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.LayerNorm([4, 8, 8]), nn.Tanh(), nn.Flatten(), nn.Linear(256, 5))


@pytest.mark.parametrize("build", [Residual, LayerNormed])
def test_restarts_run_one_by_one_where_the_framework_differentiates_them_wrongly_side_by_side(build: type[nn.Module]) -> None:
    exposure = dm.observe(seeded(build).double().train(), batch())
    made = recipe(restarts=2)
    problem = problem_under(exposure, batch().targets, made)
    start = begin(problem, torch.Generator().manual_seed(0)).variables
    right, together = evaluated(Eager, exposure, made, 2), evaluated(Functional, exposure, made, 2)
    wrong = largest_error(right, together) > 1e-8
    assert ("wrongly side by side" in reason_against_batching(problem, start)) is wrong
    objective = problem.objective
    chosen = choose(problem, start)
    inputs, _ = problem.guess.unpack(start)
    terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_zeros(0))
    pair = [path(inputs, None, objective.names, terms).inputs for path in (chosen, Eager(objective))]
    assert torch.allclose(*pair, rtol=1e-10, atol=0)


class Branching(nn.Sequential):
    """Takes one way or the other, as its input bids."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images * 2 if images.mean() > 0.1 else images)


class Constant(nn.Sequential):
    """Multiplies by a number of single precision that moves with no `.double()`."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) @ torch.eye(5)


@pytest.mark.parametrize(
    ("wrapper", "drop", "said"),
    [
        (Branching, 0.0, "this model cannot be traced side by side (vmap"),
        (nn.Sequential, 0.3, "this model draws random numbers"),
        (Constant, 0.0, "their trial in double precision failed (expected"),
        (nn.Sequential, 0.0, ""),
    ],
)
def test_why_restarts_run_one_by_one_is_said_as_it_is(wrapper: type[nn.Module], drop: float, said: str) -> None:
    model = seeded(lambda: wrapper(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Dropout(drop), nn.Flatten(), nn.Linear(144, 5)))
    exposure = dm.observe(model.train(), batch(torch.float32))
    found = dm.reconstruct(exposure, "inverting_gradients", labels=batch().targets, steps=3, restarts=2)
    assert found.outcome is dm.Outcome.COMPLETED
    assert found.message.startswith(f"restarts ran one by one, as {said}" if said else "")
    assert bool(found.message) == bool(said)


def test_weights_switch_layers_off_as_leaving_them_out_does() -> None:
    exposure = dm.observe(seeded(Residual).double().eval(), batch())
    for distance in (Cosine(), SquaredError()):
        objective = Objective(exposure, recipe(distance=distance), batch().targets)
        inputs, one = numbers(1, 3, 3, 8, 8, seed=1), torch.ones((), dtype=torch.float64)
        deep = objective.names[-4:]
        switched = torch.tensor([float(name in deep) for name in objective.names], dtype=torch.float64)
        none = inputs.new_zeros(0)
        left_out = Eager(objective)(inputs, None, deep, Terms(matching=one, priors=none))
        switched_off = Functional(objective)(inputs, None, objective.names, Terms(matching=one, priors=none, layers=switched))
        assert largest_error(left_out, switched_off) < 1e-10


def test_one_mask_hides_entries_from_both_sides() -> None:
    exposure = dm.observe(seeded(Residual).double().eval(), batch())
    objective = Objective(exposure, recipe(distance=SquaredError()), batch().targets)
    inputs, one, none = numbers(1, 3, 3, 8, 8, seed=1), torch.ones((), dtype=torch.float64), torch.zeros(0)
    masks = tuple((numbers(*t.shape, seed=4) > 0.3).double() for t in objective.target.values())
    found = Eager(objective)(inputs, None, objective.names, Terms(matching=one, priors=none, masks=masks))
    update = exposure.public.training(exposure.model, inputs[0], batch().targets, exposure.public.loss)
    by_hand = sum(float(((update[n] - exposure.update[n])[m > 0] ** 2).sum()) for n, m in zip(objective.names, masks))
    assert float(found.distance) == pytest.approx(by_hand, rel=1e-10)


@pytest.mark.parametrize("train", [True, False])
def test_the_form_that_graphs_are_recorded_from_agrees_and_writes_into_no_buffer(train: bool) -> None:
    model = seeded(Residual).double().train(train)
    exposure = dm.observe(model, batch(), training=dm.FedAvg(steps=2, learning_rate=0.1))
    objective, inputs = Objective(exposure, recipe(), batch().targets), numbers(1, 3, 3, 8, 8, seed=1)
    terms = Terms(matching=torch.ones((), dtype=torch.float64), priors=inputs.new_zeros(0))
    recorded, eager = Captured(objective), Eager(objective)(inputs, None, objective.names, terms)
    for _ in range(2):
        assert largest_error(eager, recorded(inputs, None, objective.names, terms)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, 2])
def test_the_measured_path_is_right_whichever_wins(restarts: int) -> None:
    exposure = dm.observe(seeded(Residual).double().train(), batch())
    made = recipe(restarts=restarts, path="fastest")
    problem = problem_under(exposure, batch().targets, made)
    start = begin(problem, torch.Generator().manual_seed(0)).variables
    objective = problem.objective
    inputs, _ = problem.guess.unpack(start)
    terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_zeros(0))
    chosen = choose(problem, start)
    assert isinstance(chosen, Measured)
    right = Eager(objective)(inputs, None, objective.names, terms)
    assert largest_error(right, chosen(inputs, None, objective.names, terms)) < 1e-10
    for candidate in chosen.candidates:
        assert largest_error(right, candidate(inputs, None, objective.names, terms)) < 1e-10


@pytest.mark.slow
def test_the_compiled_form_agrees_too() -> None:
    for seed, train, training in ((0, True, dm.FedSGD()), (1, True, dm.FedSGD()), (0, False, dm.FedAvg(steps=3, learning_rate=0.1))):
        model = seeded(Residual, seed).double().train(train)  # the second model must not be taken for the first
        exposure = dm.observe(model, batch(), training=training)
        made = recipe(priors=(TotalVariation(weight=0.1), batch_norm_prior(model, weight=1e-3)))
        assert largest_error(evaluated(Eager, exposure, made, 1), evaluated(Compiled, exposure, made, 1)) < 1e-10


class OldStyle(torch.autograd.Function):
    """A custom function that `torch.func` cannot take: no setup_context."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * slope


class OnlyOnce(OldStyle):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * slope


class Custom(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.early, self.head = function, nn.Linear(192, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(self.early(x.flatten(1))))


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 5)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).sub_(1)
        return self.head(x.flatten(1).tanh())


class NotANumber(nn.Module):
    """Finite on the client's small inputs, NaN on most others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((1 - x.flatten(1)).log())


ATTACKS = ("dlg", "inverting_gradients", "sapag", "stepwise")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_custom_function_without_a_functional_form_is_attacked_eagerly_and_said(attack: str) -> None:
    exposure = dm.observe(seeded(lambda: Custom(OldStyle)), batch(torch.float32))
    found = dm.reconstruct(exposure, attack, labels=batch().targets, steps=3, restarts=2, path="functional")
    assert found.outcome == dm.Outcome.COMPLETED
    assert "one by one" in found.message or "refused" in found.message


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_function_that_is_differentiable_once_is_not_attempted_and_said(attack: str) -> None:
    exposure = dm.observe(seeded(lambda: Custom(OnlyOnce)), batch(torch.float32))
    found = dm.reconstruct(exposure, attack, labels=batch().targets, steps=3)
    assert found.outcome == dm.Outcome.NOT_ATTEMPTED
    assert "differentiate" in found.message
    assert found.inputs.shape == (3, 3, 8, 8)


@pytest.mark.parametrize("path", ["eager", "functional"])
def test_a_model_that_writes_into_its_input_is_attacked_all_the_same(path: str) -> None:
    exposure = dm.observe(seeded(WritesIntoItsInput), dm.Batch(batch(torch.float32).inputs.clone(), batch().targets))
    found = dm.reconstruct(exposure, "inverting_gradients", labels=batch().targets, steps=50, path=path)
    assert found.outcome == dm.Outcome.COMPLETED
    assert found.distance is not None
    assert found.distance < 0.3


@pytest.mark.parametrize("attack", ["dlg", "sapag"])
def test_a_loss_that_is_not_a_number_everywhere_ends_as_diverged(attack: str) -> None:
    small = dm.Batch(0.5 * batch(torch.float32).inputs, batch().targets)
    exposure = dm.observe(seeded(NotANumber), small)
    found = dm.reconstruct(exposure, attack, labels=small.targets, steps=5, **({"boxed": False} if attack == "sapag" else {}))
    assert found.outcome == dm.Outcome.DIVERGED
    assert "finite" in found.message


@pytest.mark.parametrize("attack", [*ATTACKS, "gradinversion"])
def test_a_zero_update_is_impossible_only_where_random_samples_give_it_too(attack: str) -> None:
    exposure = dm.observe(seeded(Residual).eval(), batch(torch.float32))
    zero = dm.Exposure(model=exposure.model, update={k: torch.zeros_like(v) for k, v in exposure.update.items()}, public=exposure.public)
    found = dm.reconstruct(zero, attack, labels=batch().targets, steps=2)
    assert (found.outcome, found.theorem) == (dm.Outcome.NOT_ATTEMPTED, "")
    assert "the zero tells something of the batch" in found.message
    with torch.no_grad():
        for parameter in zero.model.parameters():
            parameter.zero_()
        zero.model.requires_grad_(False)
        next(iter(zero.model.parameters())).requires_grad_()  # zero weights above let nothing through to the first layer
    found = dm.reconstruct(zero, attack, labels=batch().targets, steps=2)
    assert found.outcome == dm.Outcome.IMPOSSIBLE
    assert "zero" in found.message
    assert "no method can tell the private batch from random ones" in found.theorem


def test_falling_back_keeps_the_numbers() -> None:
    class Broken(Functional):
        def __call__(self, *arguments) -> Evaluation:
            raise RuntimeError("no such kernel")

    exposure = dm.observe(seeded(Residual).double().eval(), batch())
    objective = Objective(exposure, recipe(), batch().targets)
    guarded = WithFallback([Broken(objective), Eager(objective)])
    inputs, terms = numbers(1, 3, 3, 8, 8), Terms(matching=torch.ones(()), priors=torch.zeros(0))
    found, plain = (path(inputs, None, objective.names, terms) for path in (guarded, Eager(objective)))
    assert torch.equal(found.inputs, plain.inputs)
    assert guarded.note == "broken form refused (no such kernel), ran eager"


def test_a_step_that_cannot_be_compiled_is_recorded_as_it_is_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("expected size 3==3, stride 25==1 at dim=1")

    monkeypatch.setattr(Compiled, "_translate", refuse)
    exposure = dm.observe(seeded(Residual).eval(), batch(torch.float32))
    settings = {"labels": batch().targets, "steps": 3}
    found = dm.reconstruct(exposure, "inverting_gradients", path="compiled", **settings)
    assert found.message == "compiled form refused (expected size 3==3, stride 25==1 at dim=1), ran captured"
    assert torch.equal(found.inputs, dm.reconstruct(exposure, "inverting_gradients", path="captured", **settings).inputs)
