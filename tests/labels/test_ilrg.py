"""iLRG: counts from the head's gradient, embeddings and probabilities beside."""

import pytest
import torch
from torch import nn
from torch.nn.functional import softmax

from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, Focal
from dosimeter.client.observe import observe
from dosimeter.defenses.pruning import Pruning
from dosimeter.labels.ilrg import ILRG, _least_squares
from dosimeter.network.probing import input_of
from dosimeter.runs.server import recover_labels
from dosimeter.surfaces.labels import Labels
from dosimeter.types import Batch, Refused

LABELS = [0, 0, 0, 3, 3, 8, 9, 9]
COUNTS = [3, 0, 0, 2, 0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid])
def test_counts_come_back_exactly_from_an_untrained_net(expose, activation):
    estimate = recover_labels(expose(LABELS, activation=activation), "ilrg")
    assert estimate.counts.tolist() == COUNTS
    assert estimate.labels.tolist() == LABELS
    assert estimate.confidence > 0.5


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(smoothing=0.2),
        CrossEntropy(smoothing=0.2, convention="thesis"),
        CrossEntropy(temperature=0.7),
        Focal(gamma=2.0),
        BinaryCrossEntropy(),
        BinaryCrossEntropy(over_classes="sum"),
    ],
)
def test_the_equations_follow_the_clients_loss(expose, loss):
    assert recover_labels(expose(LABELS, loss=loss), "ilrg").counts.tolist() == COUNTS


def test_one_sample_gives_its_embedding_and_probabilities_exactly(expose, inputs):
    exposure = expose([4])
    estimate = recover_labels(exposure, "ilrg")
    features = input_of(exposure.model, "2", inputs(1))
    assert torch.allclose(estimate.details["embeddings"].float(), features.expand(10, -1), rtol=1e-4, atol=1e-5)
    assert torch.allclose(estimate.details["probabilities"].float(), softmax(exposure.model(inputs(1)), 1).expand(10, -1), atol=1e-5)


def test_the_published_solution_is_the_moore_penrose_one_of_equation_seven(expose):
    exposure = expose(LABELS)
    estimate = recover_labels(exposure, "ilrg", as_published=True)
    weight_gradient, bias_gradient = exposure.update["2.weight"].double(), exposure.update["2.bias"].double()
    head = exposure.model[2].double()
    probabilities = softmax(head(weight_gradient / bias_gradient[:, None]), 1).detach()
    system = torch.cat([torch.ones(1, 10, dtype=torch.float64), probabilities.T - torch.eye(10)])
    right = torch.cat([torch.ones(1, dtype=torch.float64), bias_gradient]) * len(LABELS)
    assert torch.allclose(estimate.scores, torch.linalg.pinv(system) @ right, atol=1e-6)


def test_published_rounding_need_not_sum_to_the_batch_size(expose):
    exposure = expose(LABELS)
    published = recover_labels(exposure, "ilrg", as_published=True)
    assert published.counts.tolist() == published.scores.clamp_min(0).round().long().tolist()


def test_refinement_brings_the_counts_nearer_to_whole_numbers(expose):
    exposure = expose([3, 3, 20, 35, 35, 35], classes=40, activation=nn.SELU)
    plain, refined = (recover_labels(exposure, "ilrg", refinements=steps) for steps in (0, 10))
    assert refined.counts.tolist() == plain.counts.tolist()
    assert refined.counts[[3, 20, 35]].tolist() == [2, 1, 3]
    assert refined.confidence > plain.confidence


def test_an_undeclared_batch_size_is_inferred(expose):
    estimate = recover_labels(expose(LABELS, declare=False), "ilrg")
    assert estimate.counts.tolist() == COUNTS
    assert "8 is the smallest" in estimate.message


@pytest.mark.parametrize("seed", [10, 17, 25, 31])
def test_classes_far_rarer_than_the_commonest_are_kept_where_the_size_is_inferred(expose, seed):
    labels = torch.randint(100, (40,), generator=torch.Generator().manual_seed(seed))
    estimate = recover_labels(expose(labels, classes=100, seed=seed, declare=False), "ilrg")
    assert estimate.counts.tolist() == torch.bincount(labels, minlength=100).tolist()
    assert estimate.confidence > 0.9


@pytest.mark.parametrize(("seed", "ratio"), [(18, 0.95), (32, 0.8), (35, 0.95), (38, 0.8)])
def test_what_pruning_leaves_of_a_gradient_still_gives_counts(inputs, seed, ratio):
    labels = torch.randint(10, (16,), generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    exposure = observe(model, Batch(inputs(16, seed), labels), defenses=(Pruning(ratio=ratio),))
    assert int(recover_labels(exposure, "ilrg").counts.sum()) == 16


def test_a_singular_system_has_its_shortest_solution():
    right = torch.ones(3, 4, dtype=torch.float64)
    assert not _least_squares(torch.zeros(3, 2, dtype=torch.float64), right).any()
    system = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(_least_squares(system, right), torch.linalg.pinv(system) @ right, atol=1e-6)


def test_under_binary_cross_entropy_the_one_class_a_sample_is_said_to_be_assumed(expose):
    assert "assume one each" in recover_labels(expose(LABELS, loss=BinaryCrossEntropy()), "ilrg").message
    assert recover_labels(expose(LABELS), "ilrg").message == ""


def test_more_classes_than_candidates_keep_the_smallest_bias_gradients(expose):
    exposure = expose([3, 3, 150, 199], classes=200)
    assert torch.equal(ILRG(candidates=16)(exposure, torch.Generator()).counts, recover_labels(exposure, "ilrg").counts)
    assert len(ILRG(candidates=16)(exposure, torch.Generator()).details["classes"]) == 16


def test_a_head_without_bias_is_refused(expose):
    with pytest.raises(Refused, match="the last layer has no bias"):
        recover_labels(expose(LABELS, bias=False), "ilrg")


def test_known_classes_reduce_the_system_to_their_own_counts(expose):
    labels = [4, 4, 4, 4, 7, 7, 1, 1]
    exposure = expose(labels, classes=40)
    reduced = recover_labels(exposure, "ilrg", as_published=True, presence="gradinversion")
    present = recover_labels(exposure, "gradinversion").counts > 0
    assert reduced.counts.tolist() == torch.bincount(torch.tensor(labels), minlength=40).tolist()
    assert float(reduced.scores[~present].abs().max()) == 0  # the others are no unknowns
    assert float(recover_labels(exposure, "ilrg", as_published=True).scores[~present].abs().max()) > 0


def test_the_cosine_of_one_class_is_that_of_its_samples_mean(expose, inputs):
    exposure = expose([3, 3, 3, 5])
    truth = Batch(inputs(4), torch.tensor([3, 3, 3, 5]))
    found = recover_labels(exposure, "ilrg", as_published=True)
    true = softmax(exposure.model(truth.inputs), 1).detach().double()
    estimated = found.details["probabilities"]
    expected = [torch.cosine_similarity(estimated[3], true[:3].mean(0), 0), torch.cosine_similarity(estimated[5], true[3], 0)]
    measured = Labels().details(found, exposure, truth)["probability_cosine"]
    assert measured == pytest.approx(float(sum(expected) / 2), abs=1e-6)
    assert 0.9 < measured <= 1
