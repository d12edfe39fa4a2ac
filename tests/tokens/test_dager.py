"""Whole batches of texts from spans of gradients: decoders, encoders, local steps, LoRA, noise, and where there is no room."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.tokens.levels import shares_of_steps
from dosimeter.models.transformer import Transformer

VOCABULARY = 500


def model_of(kind="gpt2", seed=0, width=64, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(kind, vocabulary=VOCABULARY, width=width, layers=2, heads=4, positions=16, **options).eval()


def texts(seed=0, batch=3, length=6):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def lists(ids):
    return sorted(map(tuple, ids.tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_a_decoders_batch_is_exact_and_certified(seed):
    ids = texts(seed)
    found = dm.recover_tokens(dm.observe(model_of(seed=seed), dm.Batch(ids, ids.roll(-1, 1))), "dager")
    assert found.tokens == found.certified == set(ids.flatten().tolist())
    assert sorted(found.sequences) == lists(ids)
    assert all(found.certified_sequences)
    assert max(found.error_bars.values()) <= 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_an_encoders_batch_is_found_place_by_place(seed):
    ids = texts(seed)
    found = dm.recover_tokens(dm.observe(model_of("bert", classes=2), dm.Batch(ids, torch.tensor([0, 1, 0]))), "dager")
    assert found.certified == set(ids.flatten().tolist())
    assert sorted(found.sequences) == lists(ids)
    assert all(found.certified_sequences)


@pytest.mark.parametrize("protocol", [{"defenses": [dm.defense("gaussian_noise", std=1e-7)]}, {"training": dm.FedAvg(steps=3)}, {}])
def test_no_text_of_an_encoder_is_proved_that_others_fit_as_well(protocol):
    """Error bars that noise makes long hold wrong texts too: those that differ in one token must fail clearly."""
    with torch.random.fork_rng():
        torch.manual_seed(1400007)
        model = Transformer("bert", vocabulary=60, width=64, layers=2, heads=4, positions=4, classes=3).eval()
    for seed in range(4):
        ids = torch.randint(60, (4, 4), generator=torch.Generator().manual_seed(seed))
        found = dm.recover_tokens(dm.observe(model, dm.Batch(ids, torch.tensor([1, 1, 2, 2])), **protocol), "dager")
        proved = [text for text, sure in zip(found.sequences, found.certified_sequences) if sure]
        assert set(proved) <= set(lists(ids))
        assert proved or protocol


def test_texts_of_several_lengths_end_where_they_end():
    ids, mask = texts(4), torch.ones(3, 6, dtype=torch.int64)
    mask[1, 4:] = mask[2, 3:] = 0
    for kind in ("gpt2", "bert"):
        batch = dm.Batch({"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1, 0]))
        found = dm.recover_tokens(dm.observe(model_of(kind, classes=2), batch), "dager")
        assert sorted(found.sequences) == sorted(tuple(row[shown.bool()].tolist()) for row, shown in zip(ids, mask))


@pytest.mark.parametrize("training", [dm.FedAvg(learning_rate=1e-3, steps=4), dm.FedAvg(learning_rate=1e-3, epochs=2, mini_batch=1)])
def test_local_steps_put_the_drift_into_the_error_bars(training):
    ids = texts(5)
    found = dm.recover_tokens(dm.observe(model_of(), dm.Batch(ids, ids.roll(-1, 1)), training=training), "dager")
    assert found.tokens == set(ids.flatten().tolist())
    assert found.certified <= found.tokens
    assert sorted(found.sequences) == lists(ids)


def test_models_along_the_way_stand_where_the_mini_batches_step():
    assert shares_of_steps(4, 1) == [0.375, 0.75, 1.0]  # every step sees all texts
    assert shares_of_steps(4, 4) == [0.25, 0.5, 0.75, 1.0]  # the first mini-batch steps at the weights that were sent
    assert shares_of_steps(4, 2) == [0.25, 0.5, 0.75, 1.0]  # two passes: steps 0 and 2, 1 and 3
    assert len(shares_of_steps(40, 20)) <= 8
    assert shares_of_steps(2, 5) == [0.5, 1.0]


class Adapted(nn.Module):
    """LoRA by hand: W x + B A x, with W frozen."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, inputs):
        return self.layer(inputs) + self.lora_b(self.lora_a(inputs))


def adapted(rank, fresh=False):
    model = model_of(classes=2)
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for block in model.blocks:
            block.attention.query, block.attention.value = Adapted(block.attention.query, rank), Adapted(block.attention.value, rank)
            block.expand = Adapted(block.expand, rank)
    if fresh:
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                nn.init.zeros_(parameter)
    return model


def test_lora_gives_away_as_many_vectors_as_its_rank():
    ids = texts(6, 2, 5)
    found = dm.recover_tokens(dm.observe(adapted(16), dm.Batch(ids, torch.tensor([0, 1]))), "dager")
    assert found.certified == set(ids.flatten().tolist())
    assert sorted(found.sequences) == lists(ids)
    with pytest.raises(dm.Refused, match="zero, as that of a fresh LoRA adapter"):
        dm.recover_tokens(dm.observe(adapted(16, fresh=True), dm.Batch(ids, torch.tensor([0, 1]))), "dager")
    with pytest.raises(dm.Refused, match=r"no more token vectors than the gradient of \S+ has rows, 4"):  # 10 are in two matrices of rank 2
        dm.recover_tokens(dm.observe(adapted(2), dm.Batch(ids, torch.tensor([0, 1]))), "dager")


def test_texts_of_an_encoder_are_joined_where_adapters_hold_all_contexts():
    """A second matrix of LoRA receives fewer directions than there are contexts, so that it does not tell texts apart."""
    with torch.random.fork_rng():
        torch.manual_seed(2412)
        model = Transformer("bert", vocabulary=100, width=32, layers=3, heads=8, positions=8, classes=2).eval()
        model.requires_grad_(False)
        for block in model.blocks:
            block.attention.query, block.attention.value = Adapted(block.attention.query, 16), Adapted(block.attention.value, 16)
    for seed in range(2):
        ids = torch.randint(100, (1, 5), generator=torch.Generator().manual_seed(seed))
        found = dm.recover_tokens(dm.observe(model, dm.Batch(ids, torch.tensor([1]))), "dager")
        assert found.sequences == tuple(lists(ids))
        assert all(found.certified_sequences)


def test_noise_takes_tokens_away_and_adds_none():
    lost = 0
    for seed in range(6):
        ids = texts(seed)
        noise = dm.defense("gaussian_noise", std=2e-4)
        found = dm.recover_tokens(dm.observe(model_of(), dm.Batch(ids, ids.roll(-1, 1)), defenses=(noise,), seed=seed), "dager")
        assert found.certified <= set(ids.flatten().tolist())
        lost += len(set(ids.flatten().tolist()) - found.certified)
    assert lost > 0


def test_a_foreign_gradient_gives_foreign_tokens():
    mine, foreign = texts(7), texts(8)
    found = dm.recover_tokens(dm.observe(model_of(), dm.Batch(foreign, foreign)), "dager")
    assert found.tokens == set(foreign.flatten().tolist())
    assert dm.score(found, dm.Batch(mine, mine))["token_f1"] < 0.3


def test_it_refuses_a_full_span_and_dropout():
    ids = texts(9, 12, 8)
    with pytest.raises(dm.Refused, match="needs fewer token vectors than the width"):
        dm.recover_tokens(dm.observe(model_of(), dm.Batch(ids, ids)), "dager")
    model = model_of()
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    with pytest.raises(dm.Refused, match="drops units at random"):
        dm.recover_tokens(dm.observe(model.train(), dm.Batch(texts(), texts())), "dager")


def test_texts_that_begin_alike_are_all_found_at_their_own_local_steps():
    """The vectors of the first mini-batch do not drift at all, and must not rule out the later ones that begin with the same token."""
    ids = torch.tensor([[7, 1, 2, 3, 20], [7, 4, 5, 6, 21], [7, 11, 9, 10, 22], [8, 14, 15, 12, 23]])
    for training in (dm.FedAvg(learning_rate=1e-3, mini_batch=1), dm.FedAvg(learning_rate=1e-3, mini_batch=2, epochs=2)):
        exposure = dm.observe(model_of(classes=3), dm.Batch(ids, torch.tensor([0, 1, 2, 0])), training=training)
        found = dm.recover_tokens(exposure, "dager")
        assert sorted(found.sequences) == lists(ids)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_without_positions_a_run_of_one_token_proves_no_length(kind):
    """The mean of equal vectors is the vector itself, so that attention gives "a a a" the vectors of "a"."""
    model, ids = model_of(kind, classes=2), texts(6)
    with torch.no_grad():
        model.places.weight.zero_()
    truth = lists(ids)
    for row in (ids[0], torch.full((6,), 9)):
        ids[0] = row
        mask = torch.ones(3, 6, dtype=torch.int64)
        mask[0, 4:] = 0
        truth = sorted(tuple(row[: int(shown.sum())].tolist()) for row, shown in zip(ids, mask))
        batch = dm.Batch({"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1, 0]))
        exposure = dm.observe(model, batch)
        found = dm.recover_tokens(exposure, "dager")
        assert found.certified == {token for text in truth for token in text}
        assert dm.score(found, batch, exposure=exposure).details["false_certificates"] == 0
        proved = [text for text, sure in zip(found.sequences, found.certified_sequences) if sure]
        if kind == "gpt2":
            assert sorted(proved) == [text for text in truth if len(set(text)) > 1]
    if kind == "gpt2":
        assert len(found.sequences) == 3  # the run is a guess


def test_without_positions_two_orders_of_a_beginning_prove_neither():
    """Attention gives 8 the same vector behind 3, 6 as behind 6, 3. Both beginnings occur, and one text goes on."""
    model = model_of(classes=2)
    with torch.no_grad():
        model.places.weight.zero_()
    ids = torch.tensor([[3, 6, 8, 9], [6, 3, 4, 5], [7, 2, 1, 0]])
    batch = dm.Batch(ids, torch.tensor([0, 1, 0]))
    exposure = dm.observe(model, batch)
    found = dm.recover_tokens(exposure, "dager")
    assert set(lists(ids)) < set(found.sequences)
    assert dm.score(found, batch, exposure=exposure).details["false_certificates"] == 0
    assert (7, 2, 1, 0) in [text for text, sure in zip(found.sequences, found.certified_sequences) if sure]


@pytest.mark.parametrize(
    ("kind", "limit"), [("gpt2", {"tries": 10}), ("gpt2", {"search_seconds": 1e-6}), ("bert", {"search_seconds": 1e-6})]
)
def test_the_search_for_texts_ends_at_its_limit_and_says_so(kind, limit):
    ids = texts(7, 6, 8)
    exposure = dm.observe(model_of(kind, classes=2), dm.Batch(ids, torch.arange(6) % 2))
    found = dm.recover_tokens(exposure, "dager", **limit)
    assert found.certified == set(ids.flatten().tolist())
    assert "the search for texts ended after" in found.message
    assert {text for text, sure in zip(found.sequences, found.certified_sequences) if sure} <= set(lists(ids))
    assert found.outcome is dm.Outcome.PARTIAL


def test_a_gradient_below_its_noise_is_said_to_be_drowned():
    ids = texts(8)
    noise = dm.defense("gaussian_noise", std=1.0)
    with pytest.raises(dm.Refused, match="stands above the noise"):
        dm.recover_tokens(dm.observe(model_of("bert", classes=2), dm.Batch(ids, torch.tensor([0, 1, 0])), defenses=(noise,)), "dager")
