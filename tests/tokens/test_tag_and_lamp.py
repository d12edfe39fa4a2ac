"""Texts by gradient matching: the true vectors have distance 0, short texts come back, and what cannot be guessed is refused."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.gradients import eager_gradient, leaves
from dosimeter.engines.matching.distances import Cosine, SquaredAndAbsolute
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import VectorLength
from dosimeter.engines.matching.problem import make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.tokens.embedded import PREFIX, over_vectors
from dosimeter.engines.tokens.guessed_texts import distance_at
from dosimeter.engines.tokens.known_labels import labels_of_texts
from dosimeter.engines.tokens.language import pair_counts
from dosimeter.engines.tokens.reorder import best_order, draw_order
from dosimeter.models.transformer import Transformer
from dosimeter.tokens.lamp import layers_with_direction

FAST = {"tag": {"steps": 80}, "lamp": {"steps": 60, "candidates": 5, "proposals": 8, "every": 20}}


def model_of(kind="bert", seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(kind, vocabulary=60, width=16, layers=1, heads=2, positions=8, **({"classes": 3} | options)).eval()


def text(seed=0, batch=1, length=4):
    return torch.randint(60, (batch, length), generator=torch.Generator().manual_seed(seed))


def problem_of(exposure, distance):
    embedded = over_vectors(exposure, "tag")
    labels = labels_of_texts(exposure, torch.Generator().manual_seed(0))
    directed = layers_with_direction(embedded.exposure.update)
    weights = {name: float(name in directed) for name in embedded.exposure.update}
    recipe = Recipe(distance=distance, optimiser=Adam(), rate=Rate(start=0.1), steps=1, layer_weights=weights, boxed=False, path="eager")
    return embedded, make_problem(embedded.exposure, labels, recipe)


@pytest.mark.parametrize("distance", [SquaredAndAbsolute(), Cosine(per_layer=True)])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_vectors_of_the_true_tokens_have_distance_zero(kind, distance):
    ids, mask = text(), torch.ones(1, 4, dtype=torch.int64)
    for inputs in (ids, {"input_ids": ids, "attention_mask": mask}):
        embedded, problem = problem_of(dm.observe(model_of(kind), dm.Batch(inputs, torch.tensor([1]))), distance)
        assert distance_at(problem, embedded.vectors_of(ids)) == pytest.approx(0, abs=1e-5)
        assert distance_at(problem, embedded.vectors_of(ids.flip(1))) > 1e-3
        assert torch.equal(embedded.nearest(embedded.vectors_of(ids)), ids)


def test_the_distance_is_that_of_gradients_computed_by_hand():
    model, ids, other = model_of(), text(), text(1)
    exposure = dm.observe(model, dm.Batch(ids, torch.tensor([1])))
    embedded, problem = problem_of(exposure, SquaredAndAbsolute(0.5))
    wrong = eager_gradient(model, exposure.public.loss, create_graph=False)(leaves(model), {}, other, torch.tensor([1]))
    wanted = sum(
        float((wrong[name] - exposure.update[name]).square().sum() + 0.5 * (wrong[name] - exposure.update[name]).abs().sum())
        for name in exposure.update
        if PREFIX + name in embedded.exposure.update
    )
    assert distance_at(problem, embedded.vectors_of(other)) == pytest.approx(wanted, rel=1e-4)
    assert "model.tokens.weight" not in embedded.exposure.update


@pytest.mark.parametrize("name", FAST)
def test_a_short_text_comes_back_where_the_rows_list_its_tokens(name):
    ids = text(3, length=2)
    batch = dm.Batch(ids, torch.tensor([1]))
    exposure = dm.observe(model_of(seed=3), batch)
    found = dm.recover_tokens(exposure, name, rows=True, **FAST[name])
    assert dm.score(found, batch)["rouge1"].tolist() == [1.0]
    assert found.tokens == set(ids.flatten().tolist())
    assert not found.certified
    assert not any(found.certified_sequences)


@pytest.mark.parametrize("name", FAST)
def test_the_same_seed_gives_the_same_texts(name):
    auxiliary = dm.Batch(text(8, batch=5), torch.zeros(5, dtype=torch.int64))
    exposure = dm.observe(model_of(seed=3), dm.Batch(text(4), torch.tensor([1])), auxiliary=auxiliary)
    short = FAST[name] | {"steps": 6} | ({"every": 3} if name == "lamp" else {})
    one, other = (dm.recover_tokens(exposure, name, seed=5, **short) for _ in range(2))
    assert (one.sequences, one.details) == (other.sequences, other.details)


def test_labels_that_nobody_recovers_move_with_the_vectors():
    exposure = dm.observe(model_of(), dm.Batch(text(), torch.randn(1, 3)), loss=nn.MSELoss())
    assert len(dm.recover_tokens(exposure, "tag", steps=3).sequences) == 1
    with pytest.raises(dm.Refused, match="lamp guesses texts under known labels"):
        dm.recover_tokens(exposure, "lamp", steps=3)


@pytest.mark.parametrize("name", FAST)
def test_what_cannot_be_guessed_is_refused(name):
    ids = text()
    with pytest.raises(dm.Refused, match=f"{name} guesses vectors under known labels, and the targets of this model are tokens"):
        dm.recover_tokens(dm.observe(model_of(classes=None), dm.Batch(ids, ids)), name)
    frozen = model_of()
    frozen.requires_grad_(False)
    frozen.tokens.weight.requires_grad_(True)
    with pytest.raises(dm.Refused, match=f"{name} matches the gradients behind the embedding"):
        dm.recover_tokens(dm.observe(frozen, dm.Batch(ids, torch.tensor([1]))), name)


def test_a_language_of_pairs_by_hand():
    known = dm.Batch(torch.tensor([[0, 1, 2], [0, 1, 1]]), torch.tensor([0, 0]))
    language = pair_counts(known, 4)
    alone = [0.29 * count / 6 + 0.01 / 4 for count in (2, 3, 1, 0)]
    wanted = -sum(torch.tensor([alone[0], alone[1] + 0.7 * 2 / 2, alone[2] + 0.7 * 1 / 3]).log()) / 3
    assert language.surprise(torch.tensor([[0, 1, 2]])).item() == pytest.approx(float(wanted))
    assert language.surprise(torch.tensor([[0, 1, 2]])) < language.surprise(torch.tensor([[2, 1, 0]]))
    assert pair_counts(None, 4).surprise(torch.tensor([[3, 3]])).tolist() == [0.0]


@pytest.mark.parametrize("kind", range(4))
def test_other_orders_keep_all_tokens(kind):
    rng = torch.Generator().manual_seed(0)
    drawn = [draw_order(5, kind, rng) for _ in range(200)]
    assert all(sorted(order) == list(range(5)) for order in drawn)
    assert len({tuple(order) for order in drawn}) > 4 - (kind == 3)
    assert draw_order(1, kind, rng) == [0]


def test_the_best_order_has_the_lowest_value():
    wanted = [2, 0, 1]
    value = lambda order: sum(a != b for a, b in zip(order, wanted))  # noqa: E731
    assert best_order(3, value, 200, torch.Generator().manual_seed(0)) == wanted
    assert best_order(3, value, 0, torch.Generator().manual_seed(0)) == [0, 1, 2]


def test_vectors_should_be_as_long_as_known_ones():
    vectors = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    assert float(VectorLength(weight=1.0, length=2.0)(vectors, {})) == 1.0
