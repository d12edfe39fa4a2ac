"""The set of tokens from the rows of the embedding's gradient: exact, with a tied head, and behind defenses."""

from contextlib import suppress

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.models.transformer import Transformer

VOCABULARY = 300


def model_of(kind="gpt2", seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(kind, vocabulary=VOCABULARY, width=32, layers=2, heads=4, positions=16, **options).eval()


def texts(seed=0, batch=3, length=8):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_set_is_exact_certified_and_complete(kind):
    model = model_of(kind, classes=3)
    for seed in range(20):
        ids = texts(seed)
        found = dm.recover_tokens(dm.observe(model, dm.Batch(ids, torch.tensor([0, 1, 2]))), "embedding_rows")
        assert found.tokens == found.certified == set(ids.flatten().tolist())
        assert found.complete


def test_a_sparse_gradient_shows_what_a_dense_one_shows():
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCABULARY, 16, sparse=sparse), nn.Flatten(), nn.Linear(128, 3)).eval()
        for training in (dm.FedSGD(), dm.FedAvg(learning_rate=0.1, steps=2)):
            found = dm.recover_tokens(dm.observe(model, dm.Batch(texts(), torch.tensor([0, 1, 2])), training=training), "embedding_rows")
            assert found.certified == set(texts().flatten().tolist())


def test_a_token_that_does_not_reach_the_loss_is_not_claimed():
    ids, hidden = texts(1, 2), torch.ones(2, 8, dtype=torch.int64)
    hidden[0, 5:] = 0
    found = dm.recover_tokens(dm.observe(model_of(classes=2), dm.Batch({"input_ids": ids, "attention_mask": hidden}, torch.tensor([0, 1]))))
    assert found.tokens == set(ids[hidden.bool()].tolist())


@pytest.mark.parametrize("training", [dm.FedSGD(), dm.FedAvg(learning_rate=0.01, steps=4, mini_batch=1)])
def test_language_models_and_local_steps(training):
    ids = texts(2)
    found = dm.recover_tokens(dm.observe(model_of(), dm.Batch(ids, ids.roll(-1, 1)), training=training))
    assert found.tokens == found.certified == set(ids.flatten().tolist())


@pytest.mark.parametrize("name", ["adam", "rmsprop", "adagrad", "nadam"])
def test_adaptive_steps_move_no_row_without_a_gradient(name):
    ids = texts(2)
    training = dm.FedAvg(learning_rate=0.01, epochs=2, mini_batch=1, shuffle=True, optimizer=name)
    found = dm.recover_tokens(dm.observe(model_of(), dm.Batch(ids, ids.roll(-1, 1)), training=training))
    assert found.tokens == found.certified == set(ids.flatten().tolist())


@pytest.mark.parametrize(
    ("options", "tied"), [({"weight_decay": 0.1}, False), ({"optimizer": "adamw"}, False), ({"optimizer": "adam"}, True)]
)
def test_weight_decay_and_adam_at_a_tied_head_leave_guesses(options, tied):
    ids = texts(2)
    found = dm.recover_tokens(dm.observe(model_of(tied=tied), dm.Batch(ids, ids), training=dm.FedAvg(steps=2, **options)))
    assert not found.certified
    assert "guesses only" in found.message


def test_behind_a_tied_head_inputs_are_told_from_targets():
    """The head's rows of absent tokens span its part; a token that is only a target lies in this span."""
    model = model_of(tied=True)
    for seed in range(5):
        ids, targets = texts(seed, 2, 6), texts(seed + 100, 2, 6)
        found = dm.recover_tokens(dm.observe(model, dm.Batch(ids, targets)))
        inputs, only_targets = set(ids.flatten().tolist()), set(targets.flatten().tolist()) - set(ids.flatten().tolist())
        assert only_targets
        assert found.tokens == found.certified == inputs
        assert any("output layer" in premise for premise in found.premises)


def test_a_tied_head_of_full_rank_leaves_guesses():
    ids = texts(3, 6, 8)  # 48 positions, 32 features
    found = dm.recover_tokens(dm.observe(model_of(tied=True), dm.Batch(ids, ids)))
    assert not found.certified
    assert "shares its weight" in found.message


def test_pruning_leaves_a_part_that_is_still_proved():
    ids = texts(4)
    defense = dm.defense("pruning", ratio=0.97)
    found = dm.recover_tokens(dm.observe(model_of(classes=3), dm.Batch(ids, torch.arange(3)), defenses=(defense,)))
    assert found.tokens == found.certified
    assert set() < found.tokens <= set(ids.flatten().tolist())
    assert not found.complete
    assert "more tokens" in found.message


def test_clipping_changes_nothing():
    ids = texts(5)
    found = dm.recover_tokens(
        dm.observe(model_of(classes=3), dm.Batch(ids, torch.arange(3)), defenses=(dm.defense("clipping", max_norm=0.1),))
    )
    assert found.tokens == found.certified == set(ids.flatten().tolist())


@pytest.mark.parametrize("noise", ["gaussian_noise", "laplace_noise"])
def test_behind_declared_noise_no_false_token_is_certified(noise):
    """The strength is one at which some tokens drown: certified ones are right, and the others are told apart as guesses."""
    certified, drowned = 0, 0
    for seed in range(10):
        ids = texts(seed)
        option = {"std" if noise == "gaussian_noise" else "scale": 0.05}
        found = dm.recover_tokens(
            dm.observe(model_of(classes=3), dm.Batch(ids, torch.arange(3)), defenses=(dm.defense(noise, **option),), seed=seed)
        )
        true = set(ids.flatten().tolist())
        assert found.certified <= true
        assert all(found.error_bars[token] <= 1e-6 for token in found.certified)
        assert not found.complete
        certified, drowned = certified + len(found.certified), drowned + len(true - found.certified)
    assert certified > 0
    assert drowned > 0


def test_pure_noise_certifies_nothing():
    """A foreign null: an update that is nothing but the declared noise."""
    exposure = dm.observe(model_of(classes=3), dm.Batch(texts(), torch.arange(3)), defenses=(dm.defense("gaussian_noise", std=1.0),))
    found = dm.recover_tokens(exposure)
    assert not found.certified
    assert len(found.tokens) <= 2


def test_it_refuses_numbers_and_a_withheld_embedding():
    pixels = dm.observe(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), dm.Batch(torch.rand(2, 1, 4, 4), torch.tensor([0, 1])))
    with pytest.raises(dm.Refused, match="embedding_rows reads token ids, and this model takes numbers"):
        dm.recover_tokens(pixels, "embedding_rows")
    model = model_of(classes=3)
    model.tokens.weight.requires_grad_(False)
    with pytest.raises(dm.Refused, match="needs the embedding's gradient"):
        dm.recover_tokens(dm.observe(model, dm.Batch(texts(), torch.arange(3))))


@pytest.mark.slow
def test_the_set_is_exact_in_a_thousand_batches():
    model = model_of(classes=3)
    for seed in range(1000):
        ids = texts(seed, 1 + seed % 6, 1 + seed % 16)
        found = dm.recover_tokens(dm.observe(model, dm.Batch(ids, torch.arange(len(ids)) % 3)))
        assert found.tokens == found.certified == set(ids.flatten().tolist())


class Table(nn.Module):
    """Numbers beside columns of categories, each with an embedding of its own or all in one table at offsets."""

    def __init__(self, sizes, joined, numbers=2):
        super().__init__()
        self.sizes = [sum(sizes)] if joined else sizes
        self.register_buffer("offsets", torch.tensor([sum(sizes[:i]) for i in range(len(sizes))]) * joined)
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in self.sizes)
        self.rest = nn.Sequential(nn.Linear(numbers + 4 * len(sizes), 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, categories, numbers=None):
        moved = categories + self.offsets
        parts = [self.embeddings[i % len(self.embeddings)](moved[:, i]) for i in range(moved.shape[1])]
        return self.rest(torch.cat([*parts, *(() if numbers is None else (numbers,))], 1))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("numbers", [0, 2])
def test_columns_of_categories_are_read_each_from_its_own_embedding(joined, numbers):
    torch.manual_seed(3)
    sizes = [7, 12, 5]
    model = Table(sizes, joined, numbers).eval()
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randint(size, (4,), generator=rng) for size in sizes], 1)
        inputs = {"categories": ids, "numbers": torch.randn(4, numbers, generator=rng)} if numbers else ids
        batch = dm.Batch(inputs, torch.tensor([0, 1, 2, 1]))
        exposure = dm.observe(model, batch)
        found = dm.recover_tokens(exposure)
        assert found.details["columns"] == {str(i + 1): sorted(set(ids[:, i].tolist())) for i in range(3)}
        assert found.tokens == found.certified == set(ids.flatten().tolist())
        assert found.complete
        assert dm.score(found, batch, exposure=exposure).details["false_certificates"] == 0


def test_a_column_that_the_model_changes_first_proves_nothing():
    class Hashed(Table):
        def forward(self, categories, numbers=None):
            return super().forward(torch.stack([categories[:, 0] // 2, categories[:, 1], categories[:, 2]], 1), numbers)

    torch.manual_seed(0)
    ids = torch.tensor([[2, 3, 1], [5, 0, 4]])
    found = dm.recover_tokens(dm.observe(Hashed([7, 12, 5], False, 0).eval(), dm.Batch(ids, torch.tensor([0, 1]))))
    assert found.details["columns"] == {"2": [0, 3], "3": [1, 4]}
    assert not found.complete


class Bag(nn.Module):
    """Texts as a bag of embeddings, as one-hot vectors, or as rows of a parameter."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(16, 3)
        self.bag = nn.EmbeddingBag(400, 16) if kind == "bag" else nn.Linear(400, 16, bias=False) if kind == "one-hot" else None
        self.table = nn.Parameter(torch.randn(400, 16)) if kind == "parameter" else None

    def forward(self, ids):
        if self.kind == "bag":
            return self.head(self.bag(ids))
        seen = self.bag(nn.functional.one_hot(ids, 400).float()) if self.table is None else self.table[ids]
        return self.head(torch.tanh(seen).mean(1))


@pytest.mark.parametrize("kind", ["bag", "one-hot", "parameter"])
def test_any_matrix_with_a_line_for_each_token_shows_them(kind):
    torch.manual_seed(1)
    model, ids = Bag(kind).eval(), texts(2)
    batch = dm.Batch(ids, torch.tensor([0, 1, 2]))
    exposure = dm.observe(model, batch)
    found = dm.recover_tokens(exposure)
    assert found.tokens == found.certified == set(ids.flatten().tolist())
    assert found.complete
    assert dm.score(found, batch, exposure=exposure).details["false_certificates"] == 0


def test_a_table_that_the_model_reads_at_other_lines_proves_nothing():
    class Merged(Bag):
        def forward(self, ids):
            return super().forward(ids.clamp(max=350))

    torch.manual_seed(1)
    ids = torch.tensor([[3, 360, 380, 7], [1, 2, 5, 9]])
    exposure = dm.observe(Merged("parameter").eval(), dm.Batch(ids, torch.tensor([0, 1])))
    with suppress(dm.Refused):  # where the probe texts hold no such token, the whole vocabulary shows them
        assert not dm.recover_tokens(exposure).certified
