"""Foreign batches: the client's own one first, then other samples with the private labels."""

import torch
from torch import nn

import dosimeter as dm
from dosimeter.runs.audited_client import client_from
from dosimeter.runs.foreign import FOREIGN_DRAWS, foreign_batches, other_samples


def test_further_batches_are_other_samples_with_the_private_labels(classifier, batch):
    client = client_from(classifier, batch)
    first, *others = foreign_batches(client, 7)
    assert first is client.foreign
    assert len(others) == FOREIGN_DRAWS - 1
    assert all(other.inputs.shape == batch.inputs.shape for other in others)
    for other in others[:2]:
        assert other.targets.sort().values.tolist() == batch.targets.sort().values.tolist()
    for other in others[2:]:
        assert len(other.targets.unique()) == len(batch.targets)
    assert len(torch.cat([other.inputs for other in others]).flatten(1).unique(dim=0)) == len(batch.inputs) * len(others)
    again = list(foreign_batches(client, 7))
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(others, again[1:]))


def test_known_samples_are_taken_where_there_are_enough(digits):
    images, labels = digits
    batch, known = dm.Batch(images[:4], labels[:4]), dm.Batch(images[50:60], labels[50:60])
    model, rng = nn.Flatten(), torch.Generator().manual_seed(1)
    taken = other_samples(model, batch, known, dm.Normalization(), rng)
    assert len(taken.flatten(1).unique(dim=0)) == 4
    assert bool((torch.cdist(taken.flatten(1), known.inputs.flatten(1)).amin(1) == 0).all())
    drawn = other_samples(model, batch, dm.Batch(images[50:53], labels[50:53]), dm.Normalization(mean=(0.5,), std=(0.5,)), rng)
    assert drawn.shape == batch.inputs.shape
    assert float(drawn.min()) < 0
    assert float(drawn.abs().max()) <= 1
