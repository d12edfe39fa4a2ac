import pytest
import torch

import dosimeter as dm


def test_the_client_runs_fedavg(classifier, batch):
    behind = dm.observe(classifier, batch, defenses=(dm.defense("local_iterations", steps=5, learning_rate=0.2),)).update
    direct = dm.observe(classifier, batch, training=dm.FedAvg(steps=5, learning_rate=0.2)).update
    assert all(torch.equal(behind[name], direct[name]) for name in direct)


def test_a_fedavg_client_keeps_its_other_settings(classifier, batch):
    training = dm.FedAvg(steps=2, learning_rate=0.3, mini_batch=2, momentum=0.5)
    exposure = dm.observe(classifier, batch, training=training, defenses=(dm.defense("local_iterations", steps=7),))
    assert exposure.public.training == dm.FedAvg(steps=7, learning_rate=0.3, mini_batch=2, momentum=0.5)


def test_small_steps_approach_the_gradient(classifier, batch):
    plain = dm.observe(classifier.double(), dm.Batch(batch.inputs.double(), batch.targets)).update
    defense = dm.defense("local_iterations", steps=3, learning_rate=1e-7)
    sent = dm.observe(classifier, dm.Batch(batch.inputs.double(), batch.targets), defenses=(defense,)).update
    assert torch.allclose(sent["5.weight"], plain["5.weight"], atol=1e-6)


def test_it_is_refused_after_dpsgd(classifier, batch):
    defenses = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.0), dm.defense("local_iterations", steps=2))
    with pytest.raises(dm.Refused, match="this client runs clipped_sgd"):
        dm.observe(classifier, batch, defenses=defenses)
