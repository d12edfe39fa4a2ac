"""The loop: selection, budgets, checkpoints that resume bit for bit, progress, consistency, and what it leaves alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Generator, nn

import dosimeter as dm
from dosimeter.artefacts import save_checkpoints
from dosimeter.engines.matching import descent
from dosimeter.engines.matching.attack import objective_at
from dosimeter.engines.matching.checkpoints import Checkpoint
from dosimeter.engines.matching.consistency import consensus
from dosimeter.engines.matching.distances import Cosine, SquaredError
from dosimeter.engines.matching.features import FeatureMatch
from dosimeter.engines.matching.optimisers import LBFGS, Adam
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.problem import make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Layers, Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.engines.matching.state import begin
from dosimeter.interfaces import Training
from dosimeter.progress import listening


def exposed(dropout: float = 0.0) -> tuple[dm.Exposure, dm.LabelEstimate]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 5))
        batch = dm.Batch(torch.rand(2, 1, 6, 6), torch.tensor([1, 4]))
        exposure = dm.observe(model.train() if dropout else model.eval(), batch)
    return exposure, dm.LabelEstimate(counts=torch.bincount(batch.targets, minlength=5), labels=batch.targets)


def recipe(**changes) -> Recipe:
    return Recipe(**({"distance": Cosine(), "optimiser": Adam(sign="signed"), "rate": Rate(start=0.1), "steps": 60} | changes))


def run(made: Recipe, exposure: dm.Exposure, labels: dm.LabelEstimate, seed: int = 0) -> dm.Reconstruction:
    return solve(exposure, labels, Generator().manual_seed(seed), made)


def checkpoint_of(exposure: dm.Exposure, labels: dm.LabelEstimate, made: Recipe) -> Path:
    problem = make_problem(exposure, labels, made)
    return Checkpoint(exposure, made, begin(problem, Generator().manual_seed(0)).variables, problem.guess.targets).file.path


def test_more_restarts_begin_with_the_same_ones_and_end_no_worse() -> None:
    exposure, labels = exposed()
    one, three = run(recipe(path="eager"), exposure, labels), run(recipe(restarts=3, path="eager"), exposure, labels)
    assert one.objective == three.restarts[0]
    assert three.objective == min(three.restarts) <= one.objective


def test_a_trial_ends_all_restarts_but_the_best_and_keeps_their_objectives() -> None:
    exposure, labels = exposed()
    found = run(recipe(restarts=3, trial=0.2), exposure, labels)
    assert len(found.restarts) == 3
    assert found.restarts[0] == found.objective == min(found.restarts)
    assert "2 of 3 restarts ended after their trial" in found.message


def test_guesses_that_fit_alike_are_averaged_and_the_objective_is_that_of_their_mean() -> None:
    exposure, labels = exposed()
    made = recipe(restarts=4, trial=0.2, survivors=2)
    best = run(made, exposure, labels)
    assert "2 of 4 restarts ended after their trial" in best.message
    assert "fit alike" not in best.message
    assert best.objective == pytest.approx(objective_at(exposure, made, best.inputs, best.labels), rel=1e-4)
    far = max(best.restarts[:2]) / min(best.restarts[:2])
    apart, mean = (run(dataclasses.replace(made, average_within=factor), exposure, labels) for factor in (1 + 0.5 * (far - 1), 2 * far))
    assert torch.equal(apart.inputs, best.inputs)
    assert "the mean of 2 guesses that fit alike" in mean.message
    assert not torch.equal(mean.inputs, best.inputs)
    assert mean.objective == pytest.approx(objective_at(exposure, made, mean.inputs, mean.labels), rel=1e-4)
    assert mean.restarts == best.restarts


def test_patience_and_found_and_time_stop_the_run_and_say_so() -> None:
    exposure, labels = exposed()
    still = run(recipe(rate=Rate(start=1e-12), patience=20, steps=1000), exposure, labels)
    assert "no better for 20 steps, stopped after 20" in still.message
    near = run(recipe(tolerance=0.5, steps=1000), exposure, labels)
    assert near.message.startswith("matched after")
    late = run(recipe(seconds=1e-9, steps=1000), exposure, labels)
    assert "time budget" in late.message
    assert late.outcome == dm.Outcome.COMPLETED


def test_a_stalled_run_begins_anew_within_its_steps_and_the_best_round_is_returned() -> None:
    exposure, labels = exposed()
    made = recipe(rate=Rate(start=1e-12), patience=20, steps=100)
    once, anew = (run(dataclasses.replace(made, restart_on_stall=again), exposure, labels) for again in (False, True))
    assert "the best of 5 rounds" in anew.message
    assert "rounds" not in once.message
    assert anew.objective < once.objective
    late = run(dataclasses.replace(made, restart_on_stall=True, seconds=1e-9), exposure, labels)
    assert "rounds" not in late.message


def test_progress_is_told_with_the_objective() -> None:
    exposure, labels = exposed()
    heard = []
    with listening(lambda done, total, note: heard.append((done, total, note))):
        run(recipe(steps=25), exposure, labels)
    assert [done for done, _, _ in heard] == [0, 10, 20, 25]
    assert all(total == 25 and note.startswith("objective ") for _, total, note in heard)


@pytest.mark.parametrize(
    "made",
    [
        recipe(dropout=0.3, layers=Layers(shares=2, every=0.2), priors=(TotalVariation(weight=0.1, onset=0.5),), restarts=2),
        recipe(distance=SquaredError(), optimiser=LBFGS(history=10), rate=Rate(start=1, shape="constant"), boxed=False, joint_labels=True),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_killed_run_resumes_bit_for_bit(made: Recipe, dropout: float, tmp_path: Path) -> None:
    exposure, labels = exposed(dropout)
    whole = run(made, exposure, labels)

    def kill(done: int, total: int, note: str) -> None:
        if done >= 40:
            raise KeyboardInterrupt

    with save_checkpoints(tmp_path, every=0), pytest.raises(KeyboardInterrupt), listening(kill):
        run(made, exposure, labels)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("*.png"))) == 1
    first: list[int] = []
    with save_checkpoints(tmp_path, every=0), listening(lambda done, total, note: first.append(done)):
        resumed = run(made, exposure, labels)
    assert first[0] == 40
    assert torch.equal(resumed.inputs, whole.inputs)
    assert resumed.restarts == whole.restarts
    assert not list(tmp_path.glob("*.safetensors"))


def test_another_seed_does_not_resume_from_this_ones_checkpoint_and_a_torn_one_is_ignored(tmp_path: Path) -> None:
    exposure, labels = exposed()

    def kill(done: int, total: int, note: str) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with save_checkpoints(tmp_path, every=0), pytest.raises(KeyboardInterrupt), listening(kill):
        run(recipe(), exposure, labels)
    for seed in (1, 0):
        for file in tmp_path.glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:100])
        first: list[int] = []
        with save_checkpoints(tmp_path, every=1e9), listening(lambda done, total, note, seen=first: seen.append(done)):
            run(recipe(), exposure, labels, seed)
        assert first[0] == 0


def test_other_labels_losses_and_trainings_do_not_resume_from_these_ones_checkpoint(tmp_path: Path) -> None:
    exposure, labels = exposed()
    others = dataclasses.replace(labels, labels=torch.tensor([0, 2]))
    soft = dataclasses.replace(labels, soft=torch.full((2, 5), 0.2))

    def kill(done: int, total: int, note: str) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with save_checkpoints(tmp_path, every=0), pytest.raises(KeyboardInterrupt), listening(kill):
        run(recipe(), exposure, labels)
    public, counts = exposure.public, []
    smoothed = dataclasses.replace(exposure, public=dataclasses.replace(public, loss=dm.CrossEntropy(smoothing=0.1)))
    local = dataclasses.replace(exposure, public=dataclasses.replace(public, training=dm.FedAvg(steps=2)))
    for sent, given in ((exposure, others), (exposure, soft), (smoothed, labels), (local, labels), (exposure, labels)):
        first: list[int] = []
        with save_checkpoints(tmp_path, every=1e9), listening(lambda done, total, note, seen=first: seen.append(done)):
            run(recipe(), sent, given)
        counts.append(first[0])
    assert counts == [0, 0, 0, 0, 20]


def test_features_to_the_last_bit_are_part_of_what_a_checkpoint_is_of() -> None:
    exposure, labels = exposed()
    features = torch.rand(2, 64, generator=Generator().manual_seed(0))
    nearly = features.clone()
    nearly[1, 40] += 1e-6
    names = []
    with save_checkpoints("unused"):
        for wanted in (features, nearly, features.clone()):
            match = FeatureMatch(weight=1.0, head="5", features=wanted, slots=torch.arange(2), distance=Cosine())
            names.append(checkpoint_of(exposure, labels, recipe(priors=(match,))))
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("every", [-1.0, float("nan"), float("inf")])
def test_checkpoints_at_no_time_are_refused(every: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected seconds, 0 or more"), save_checkpoints(tmp_path, every):
        pass


def test_a_soft_label_that_is_nothing_is_refused() -> None:
    exposure, labels = exposed()
    with pytest.raises(dm.Refused, match="0 in every class"):
        run(recipe(), exposure, dataclasses.replace(labels, soft=torch.tensor([[0.0] * 5, [0.2] * 5])))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_soft_labels_that_are_no_distribution_are_refused_where_the_loss_shares_out_a_whole(share: float) -> None:
    exposure, _ = exposed()
    soft = torch.full((2, 5), share)
    with pytest.raises(ValueError, match=f"labels: each soft label must sum to 1, got sums from {5 * share:g}"):
        dm.reconstruct(exposure, "inverting_gradients", labels=soft, steps=2)
    each_for_itself = dataclasses.replace(exposure, public=dataclasses.replace(exposure.public, loss=dm.BinaryCrossEntropy()))
    found = dm.reconstruct(each_for_itself, "inverting_gradients", labels=soft, steps=2)
    assert torch.equal(found.labels, soft)


def test_an_error_in_the_middle_ends_in_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        torch.empty(10**15)  # more than any machine has

    exposure, labels = exposed()
    monkeypatch.setattr(descent, "move", fail)
    found = run(recipe(), exposure, labels)
    assert found.outcome is dm.Outcome.CRASHED
    assert found.message.startswith("out of memory")


def test_a_memory_that_no_machine_has_is_no_traceback() -> None:
    exposure, labels = exposed()
    found = run(recipe(optimiser=LBFGS(history=10**12)), exposure, labels)
    assert found.outcome is dm.Outcome.CRASHED
    assert "out of memory" in found.message


def test_a_history_is_as_long_as_the_run_at_most() -> None:
    exposure, labels = exposed()
    long, enough = (dm.reconstruct(exposure, "dlg", labels=labels, steps=30, history=history) for history in (10**12, 30))
    assert long.outcome is dm.Outcome.COMPLETED
    assert torch.equal(long.inputs, enough.inputs)


@pytest.mark.parametrize("rate", [1e38, 3e38])
def test_a_rate_beyond_all_numbers_diverges_and_says_so(rate: float) -> None:
    exposure, labels = exposed()
    found = dm.reconstruct(exposure, "inverting_gradients", labels=labels, steps=30, learning_rate=rate)
    assert found.outcome is dm.Outcome.DIVERGED
    assert "a smaller learning rate" in found.message


@pytest.mark.parametrize("attack", ["dlg", "inverting_gradients", "sapag", "stepwise"])
def test_an_endless_rate_is_refused(attack: str) -> None:
    exposure, labels = exposed()
    with pytest.raises(ValueError, match="learning_rate: expected a finite number, got inf"):
        dm.reconstruct(exposure, attack, labels=labels, steps=3, learning_rate=float("inf"))


def test_nothing_of_the_callers_is_touched() -> None:
    exposure, labels = exposed(dropout=0.5)
    state = {name: tensor.clone() for name, tensor in exposure.model.state_dict().items()}
    numbers = torch.get_rng_state()
    run(recipe(steps=10), exposure, labels)
    assert all(torch.equal(state[name], tensor) for name, tensor in exposure.model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in exposure.model.parameters())


def test_consistency_pulls_restarts_together() -> None:
    exposure, labels = exposed()
    free, pulled = (run(recipe(restarts=3, consistency=weight, rate=Rate(start=0.05)), exposure, labels) for weight in (0.0, 100.0))
    assert max(pulled.restarts) - min(pulled.restarts) < max(free.restarts) - min(free.restarts)


def test_the_consensus_pairs_samples_of_one_label_before_it_takes_the_mean() -> None:
    samples = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
    restarts = torch.stack([samples, samples[[1, 0, 2]]])
    same, distinct = torch.tensor([7, 7, 2]), torch.tensor([1, 2, 3])
    assert torch.equal(consensus(restarts, same), restarts)
    assert torch.allclose(consensus(restarts, distinct)[0, :, 0, 0, 0], torch.tensor([0.5, 0.5, 2.0]))


def test_a_registered_consensus_lays_shifted_pictures_over_each_other() -> None:
    picture = torch.zeros(1, 1, 12, 12)
    picture[..., 3:6, 4:9] = 1.0
    shifted = picture.roll(2, dims=-1)
    restarts = torch.stack([picture, picture, shifted])
    plain, registered = (consensus(restarts, torch.zeros(1, dtype=torch.long), registered=way) for way in (False, True))
    assert float((registered[0] - picture).abs().max()) < 1e-6
    assert float((plain[0] - picture).abs().max()) > 0.3


def test_only_the_layers_of_the_schedule_count_in_the_end() -> None:
    exposure, labels = exposed()
    skipped = frozenset({"0.weight", "0.bias"})
    found = run(recipe(layers=Layers(skipped=skipped)), exposure, labels)
    update = exposure.public.training(exposure.model, found.inputs, labels.labels, exposure.public.loss)
    deep = [name for name in exposure.update if name not in skipped]
    expected = Cosine()([update[name] for name in deep], [exposure.update[name] for name in deep])
    assert found.distance == pytest.approx(float(expected), rel=1e-4)


def test_a_training_without_a_functional_form_is_replayed_eagerly_and_said() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Doubled(Training):
        name = "doubled"

        def __call__(self, model, inputs, targets, loss, create_graph=False):
            return {name: 2 * change for name, change in dm.FedSGD()(model, inputs, targets, loss, create_graph).items()}

    exposure, labels = exposed()
    public = dataclasses.replace(exposure.public, training=Doubled())
    update = {name: 2 * change for name, change in exposure.update.items()}
    doubled = dataclasses.replace(exposure, public=public, update=update)
    plain, found = run(recipe(path="eager"), exposure, labels), run(recipe(path="functional"), doubled, labels)
    assert found.distance == pytest.approx(plain.distance, rel=1e-2)
    assert "doubled has no functional form" in found.message
