"""What candidates prove: a fit, its uniqueness, and what the protocol allows."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dosimeter.client.training import FedAvg, FedSGD
from dosimeter.engines.scalar.problem import Candidates
from dosimeter.engines.scalar.search import solve
from dosimeter.engines.scalar.verdict import doubt_of, verdict
from dosimeter.registry import DEFENSES
from dosimeter.types import Outcome

SMOOTHED = [0.02, 0.02, 0.86, 0.02, 0.02, 0.02, 0.02, 0.02]
PLAIN = SimpleNamespace(defenses=(), training=FedSGD())


def candidates(found: Candidates, **changes) -> Candidates:
    return dataclasses.replace(found, **{name: np.array(value) for name, value in changes.items()})


@pytest.fixture
def solved(sample):
    """A problem whose one candidate is the truth."""
    problem, found = solve(sample(SMOOTHED, bias=False).head, 1.0, "smoothing", use_bias=True)
    first = {field.name: getattr(found, field.name)[:1] for field in dataclasses.fields(found) if field.name != "read"}
    return problem, dataclasses.replace(found, **first)


def test_the_one_scalar_that_fits_is_certified(solved) -> None:
    problem, found = solved
    judged = verdict(found, problem, PLAIN)
    assert judged.outcome is Outcome.COMPLETED
    assert judged.explained
    assert judged.label_certified
    assert judged.feature_certified
    assert judged.message == ""


@pytest.mark.parametrize(("bar", "spread"), [(2e-3, 1e-6), (1e-6, 2e-3), (0.9e-3, 0.9e-3)])
def test_label_and_feature_are_certified_by_their_own_error(solved, bar, spread) -> None:
    problem, found = solved
    judged = verdict(candidates(found, error_bars=[bar], spreads=[spread]), problem, PLAIN)
    assert (judged.label_certified, judged.feature_certified) == (bar < 1e-3, spread < 1e-3)


def test_a_residual_beyond_the_noise_explains_nothing(solved) -> None:
    problem, found = solved
    for factor, explained in ((9.9, True), (10.1, False)):
        judged = verdict(candidates(found, residuals=[factor * found.floors[0]]), problem, PLAIN)
        assert judged.explained == explained
        assert judged.label_certified == explained
    assert judged.outcome is Outcome.PARTIAL
    assert "no scalar makes" in judged.message


def test_two_scalars_that_fit_are_ambiguous_only_where_their_labels_differ(solved) -> None:
    problem, found = solved
    for distance, outcome in ((1e-4, Outcome.COMPLETED), (1e-2, Outcome.AMBIGUOUS)):
        other = found.labels[0].copy()
        other[0] += distance
        twice = {field.name: np.repeat(getattr(found, field.name), 2, 0) for field in dataclasses.fields(found) if field.name != "read"}
        judged = verdict(dataclasses.replace(found, **(twice | {"labels": np.stack([found.labels[0], other])})), problem, PLAIN)
        assert judged.outcome is outcome


def test_a_range_of_scalars_that_fit_is_ambiguous(solved) -> None:
    problem, found = solved
    assert verdict(candidates(found, blurs=[0.02]), problem, PLAIN).outcome is Outcome.AMBIGUOUS


def test_too_few_visible_rows_certify_nothing(solved) -> None:
    problem, found = solved
    hidden = problem.ratios.copy()
    hidden[np.argsort(np.abs(hidden))[:-3]] = 0.0
    judged = verdict(found, dataclasses.replace(problem, ratios=hidden), PLAIN)
    assert "too few rows" in judged.doubt
    assert not judged.label_certified


@pytest.mark.parametrize("name", ["clipping", "pruning", "gaussian_noise"])
def test_a_defense_that_changes_values_leaves_a_guess(solved, name) -> None:
    options = {"clipping": {"max_norm": 1.0}, "pruning": {"ratio": 0.5}, "gaussian_noise": {"std": 0.1}}[name]
    defended = SimpleNamespace(defenses=(DEFENSES.build(name, **options),), training=FedSGD())
    assert name in doubt_of(defended)
    problem, found = solved
    judged = verdict(found, problem, defended)
    assert judged.outcome is Outcome.PARTIAL
    assert not judged.label_certified


def test_what_is_withheld_changes_no_value_and_local_steps_do() -> None:
    assert doubt_of(SimpleNamespace(defenses=(DEFENSES.build("bias_withheld"),), training=FedSGD())) == ""
    assert doubt_of(SimpleNamespace(defenses=(), training=FedAvg(steps=1, learning_rate=0.1))) == ""
    assert "local steps" in doubt_of(SimpleNamespace(defenses=(), training=FedAvg(steps=3, learning_rate=0.1)))


def test_a_label_of_another_family_that_the_bias_tells_is_not_certified(sample) -> None:
    problem, found = solve(sample([0.4, 0.1, 0.2, 0.05, 0.25], dtype=torch.float64).head, 1.0, "smoothing", use_bias=True)
    judged = verdict(found, problem, PLAIN)
    assert not judged.explained
    assert not judged.label_certified
    assert "the bias tells the feature" in judged.message


@pytest.mark.parametrize("bias", [True, False])
def test_a_gradient_that_rounding_does_not_explain_is_not_one_sample(sample, bias) -> None:
    head = sample([0, 0, 1.0, 0, 0, 0, 0, 0], bias=bias, dtype=torch.float32).head
    noise = torch.randn(head.weight_gradient.shape, generator=torch.Generator().manual_seed(0))
    for size, certified in ((0.0, True), (1e-5, False)):
        sent = dataclasses.replace(head, weight_gradient=head.weight_gradient + size * head.weight_gradient.norm() * noise / noise.norm())
        problem, found = solve(sent, 1.0, "smoothing", use_bias=True)
        judged = verdict(found, problem, PLAIN)
        assert judged.feature_certified == certified
        assert ("rank one" in judged.doubt) != certified
        if not certified:  # a difference of weights carries their rounding
            declared = SimpleNamespace(defenses=(), training=FedAvg(steps=1, learning_rate=0.1))
            assert "rank one" not in verdict(found, problem, declared).doubt


def test_a_label_with_a_negative_entry_is_no_label(sample) -> None:
    """The sum of two equal steps' gradients tells the feature, and a label of 2y − p."""
    head = sample([0, 0, 1.0, 0, 0, 0, 0, 0], dtype=torch.float64).head
    twice = dataclasses.replace(head, weight_gradient=2 * head.weight_gradient, bias_gradient=2 * head.bias_gradient)
    problem, found = solve(twice, 1.0, "one_hot", use_bias=True)
    assert "an entry of -" in verdict(found, problem, PLAIN).doubt
