"""Features and gradients of the server's own samples, against loops over single samples."""

from dataclasses import replace

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.counting import auxiliary
from dosimeter.engines.counting.auxiliary import DUMMIES, Reference, class_gradients, logits_in_chunks, reference_at
from dosimeter.network import received
from dosimeter.network.head import Head, find_head
from dosimeter.network.operations import forward_flops


@pytest.fixture
def exposure(classifier, batch) -> dm.Exposure:
    return dm.observe(classifier, batch, auxiliary=batch)


def test_features_are_what_the_layer_receives(exposure, classifier, batch, rng):
    reference = reference_at(exposure, "5", "available", rng)
    torch.testing.assert_close(reference.features, classifier[:5](batch.inputs))
    assert torch.equal(reference.labels, batch.targets)
    soft = replace(exposure, auxiliary=dm.Batch(batch.inputs, torch.eye(10)[batch.targets]))
    assert torch.equal(reference_at(soft, "5", "auxiliary", rng).labels, batch.targets)


def test_without_auxiliary_data_there_are_dummies_or_a_refusal(exposure, rng):
    bare = replace(exposure, auxiliary=None)
    for given, source in ((exposure, "dummy"), (bare, "available")):
        reference = reference_at(given, "5", source, rng)
        assert reference.features.shape == (DUMMIES, 12)
        assert reference.labels is None
    with pytest.raises(dm.Refused, match="auxiliary data are not granted"):
        reference_at(bare, "5", "auxiliary", rng)


def test_a_model_of_many_operations_sees_fewer_dummies_but_a_batch_at_least(exposure, rng, monkeypatch):
    flops = forward_flops(exposure.model, torch.zeros(1, *exposure.public.input_shape))
    for passes, batch_size, expected in ((100.5, 6, 100), (1, 6, auxiliary.FEWEST_DUMMIES), (1, 50, 50), (1, 10**6, DUMMIES)):
        monkeypatch.setattr(auxiliary, "DUMMY_FLOPS", passes * flops)
        bare = replace(exposure, auxiliary=None, public=replace(exposure.public, batch_size=batch_size))
        assert len(reference_at(bare, "5", "dummy", rng).features) == expected


def test_in_train_mode_the_pieces_have_the_clients_batch_size(normed_classifier, batch, rng):
    pairs = dm.Batch(batch.inputs[:2], batch.targets[:2])
    exposure = dm.observe(normed_classifier.train(), pairs, auxiliary=batch)
    found = reference_at(exposure, "4", "auxiliary", rng).features
    expected = torch.cat([normed_classifier[:4](piece) for piece in batch.inputs.split(2)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_chunks_are_the_logits_in_order(exposure, rng, monkeypatch):
    head = find_head(exposure)
    features = torch.rand(7, 12, generator=rng)
    monkeypatch.setattr(auxiliary, "CHUNK", 30)
    pieces = [(rows, logits) for rows, logits in logits_in_chunks(head, features)]
    assert [len(logits) for _, logits in pieces] == [3, 3, 1]
    torch.testing.assert_close(torch.cat([logits for _, logits in pieces]), head.logits(features.double()))


def gradients_by_hand(loss, head: Head, features, labels):
    """Per class, the mean over the classes seen of the mean gradient of their samples."""
    of_class = {int(j): loss.logit_gradient(head.logits(features[labels == j]), labels[labels == j]).mean(0) for j in labels.unique()}
    own = torch.stack([of_class[j][j] if j in of_class else torch.tensor(torch.nan) for j in range(head.classes)])
    others = [[g[j] for i, g in of_class.items() if i != j] for j in range(head.classes)]
    return own, torch.stack([torch.stack(column).mean() for column in others])


def test_class_gradients_are_the_means_of_single_samples(exposure, rng):
    head, loss = find_head(exposure), dm.CrossEntropy()
    features = torch.rand(9, 12, generator=rng, dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 2, 2, 2, 5, 9, 9])
    own, negative = class_gradients(loss, head, Reference(features=features, labels=labels))
    wanted, wanted_negative = gradients_by_hand(loss, head, features, labels)
    seen = torch.tensor([0, 1, 2, 5, 9])
    torch.testing.assert_close(own[seen], wanted[seen].to(own))
    torch.testing.assert_close(negative, wanted_negative.to(negative))
    middle = head.logits(features).mean(0)
    assert float(own[3]) == pytest.approx(float(middle.softmax(0)[3]) - 1)
    doubled, _ = class_gradients(loss, head, Reference(features=features, labels=labels), torch.full((9,), 2.0))
    torch.testing.assert_close(doubled, 2 * own)


def test_a_single_class_is_refused(exposure):
    with pytest.raises(dm.Refused, match="at least two classes"):
        class_gradients(dm.CrossEntropy(), find_head(exposure), Reference(features=torch.rand(2, 12), labels=torch.tensor([3, 3])))


def test_a_declared_size_that_batch_norm_cannot_take_is_refused(rng):
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).train()
    auxiliary = dm.Batch(torch.rand(4, 8), torch.arange(4))
    exposure = dm.observe(model, dm.Batch(torch.rand(2, 8), torch.tensor([0, 1])), auxiliary=auxiliary)
    exposure = replace(exposure, public=replace(exposure.public, batch_size=1))
    with pytest.raises(dm.Refused, match="cannot run on batches of 1"):
        reference_at(exposure, "3", "auxiliary", rng)


def _count_passes(monkeypatch) -> list[str]:
    passes: list[str] = []
    genuine = received.input_of
    monkeypatch.setattr(received, "input_of", lambda model, layer, piece: (passes.append(layer), genuine(model, layer, piece))[1])
    return passes


def test_features_are_computed_once_for_all_methods_and_all_clients_of_a_model(classifier, batch, rng, monkeypatch):
    passes = _count_passes(monkeypatch)
    other = dm.Batch(batch.inputs.flip(0), batch.targets)
    exposures = [dm.observe(classifier, samples, auxiliary=batch) for samples in (batch, other)]
    first, again = (reference_at(exposure, "5", "auxiliary", rng).features for exposure in exposures)
    assert len(passes) == 1
    assert torch.equal(first, again)
    torch.testing.assert_close(again, classifier[:5](batch.inputs))
    for name in ("llg_plus", "posterior", "cv_matching", "zlg"):
        dm.recover_labels(exposures[0], name)
    assert len(passes) == 1
    reference_at(replace(exposures[0], auxiliary=other), "5", "auxiliary", rng)
    assert len(passes) == 2


@pytest.mark.parametrize("write", [lambda weight: weight.data.mul_(-2), lambda weight: setattr(weight, "data", -2 * weight.data)])
def test_features_of_other_weights_are_computed_anew(classifier, batch, rng, write):
    """A federation that writes to `parameter.data` leaves versions and identities as they were."""
    before = reference_at(dm.observe(classifier, batch, auxiliary=batch), "5", "auxiliary", rng).features
    write(classifier[0].weight)
    after = reference_at(dm.observe(classifier, batch, auxiliary=batch), "5", "auxiliary", rng).features
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, classifier[:5](batch.inputs))


def test_features_behind_dropout_are_drawn_by_every_method(batch, rng, monkeypatch):
    passes = _count_passes(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(batch.inputs[0].numel(), 10)).train()
    exposure = dm.observe(model, batch, auxiliary=batch)
    one, two = (reference_at(exposure, "2", "auxiliary", rng).features for _ in range(2))
    assert len(passes) == 2
    assert not torch.equal(one, two)
    model.eval()
    exposure = dm.observe(model, batch, auxiliary=batch)
    assert torch.equal(*(reference_at(exposure, "2", "auxiliary", rng).features for _ in range(2)))
    assert len(passes) == 3
