"""GradFilt with its inserted layer: many target samples, other rounds, refusals."""

import pytest
import torch

import dosimeter as dm


@pytest.fixture
def batch(digits) -> dm.Batch:
    """Twenty samples of class 5, then twenty others."""
    images, labels = digits
    chosen = torch.cat([(labels == 5).nonzero().flatten()[:20], (labels != 5).nonzero().flatten()[:20]])
    return dm.Batch(images[chosen], labels[chosen])


def test_many_targets_are_read_off_the_inserted_layer(batch, classifier) -> None:
    attack = dm.attack("gradfilt_imprint", targets=(5,), expected=20)
    found = dm.reconstruct(dm.observe(attack.tamper(classifier), batch), attack)
    nearest = torch.cdist(found.inputs.flatten(1), batch.inputs[:20].flatten(1)).min(1)
    assert len(found.inputs) >= 18
    assert float(nearest.values.max()) < 1e-3
    assert len(nearest.indices.unique()) == len(found.inputs)
    assert (found.labels == 5).all()
    assert "20 of 40 samples are of the target classes" in found.message


def test_the_next_round_has_other_rows_and_the_moments_of_what_was_found(batch, classifier) -> None:
    first = dm.attack("gradfilt_imprint", targets=(5,), expected=20)
    found = dm.reconstruct(dm.observe(first.tamper(classifier), batch), first)
    second = first.after(found)
    assert (second.round, second.targets, second.expected) == (1, (5,), 20)
    assert second.moments is not None
    rows = [attack.tamper(classifier).rows.weight for attack in (first, second)]
    assert not torch.equal(*rows)


@pytest.mark.parametrize(("sent", "attack"), [("gradfilt", "gradfilt_imprint"), ("gradfilt_imprint", "gradfilt")])
def test_the_other_attacks_model_is_refused(sent, attack, batch, classifier) -> None:
    options = {"gradfilt": {"targets": (5,)}, "gradfilt_imprint": {"targets": (5,), "expected": 20}}
    exposure = dm.observe(dm.attack(sent, **options[sent]).tamper(classifier), batch)
    with pytest.raises(dm.Refused, match="gradfilt_imprint"):
        dm.reconstruct(exposure, attack, **options[attack])


def test_the_expected_number_must_be_said() -> None:
    with pytest.raises(ValueError, match="expected"):
        dm.attack("gradfilt_imprint", targets=(5,))
