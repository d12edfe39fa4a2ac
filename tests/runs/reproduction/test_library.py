import numpy as np
import pytest
import torch

from dosimeter.models.loading import ModelConfig
from dosimeter.runs.reproduction import library as library_module
from dosimeter.runs.reproduction.library import Library, content_hash
from dosimeter.runs.reproduction.tables import RowData

DATA = RowData(name="digits", size=8, batch_size=2)


@pytest.fixture
def library(tmp_path) -> Library:
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8), "labels": np.arange(20) % 2}
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "mine.npz", **arrays)
    return Library(data=tmp_path / "data", cache=tmp_path / "cache")


def test_names_are_looked_up_in_the_folder_then_stood_in_for(library):
    assert library.available("digits", None) == "digits"
    assert library.available("mine", "digits") == "mine"
    assert library.available("mnist", "digits") == "digits"
    assert len(library.images("mine", "all", RowData(name="mine", batch_size=2))) == 20


def test_a_missing_file_is_named(library, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"data/cifar10.npz: this table needs it"):
        library.available("cifar10", None)
    monkeypatch.delenv("DOSIMETER_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"cifar10.npz: .* --data DIR or DOSIMETER_DATA"):
        Library().available("cifar10", None)
    with pytest.raises(FileNotFoundError, match="this table needs these weights"):
        library.weights("resnet20")


def test_the_environment_says_where_data_and_cache_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("DOSIMETER_DATA", str(tmp_path / "here"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert (Library().data, Library().cache) == (tmp_path / "here", tmp_path / "there" / "dosimeter")


def test_images_take_the_size_and_channels_of_the_row(library):
    wide = library.images("mine", "all", RowData(name="mine", batch_size=2, size=16, channels=1))
    assert wide.images.shape == (20, 1, 16, 16)
    assert content_hash(wide) != content_hash(library.images("mine", "all", RowData(name="mine", batch_size=2)))


def test_untrained_models_follow_the_seed(library):
    images = library.images("digits", "train", DATA)
    config = ModelConfig(name="fcn3", options={"hidden": (5,)})
    first, again, other = (library.model(config, DATA, images, seed).state_dict()["fc1.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert library.accuracy(config, DATA, images)["accuracy"] is None


def test_a_model_is_trained_once_and_then_read(library, tmp_path, monkeypatch):
    images = library.images("digits", "train", DATA)
    config = ModelConfig(name="fcn3", epochs=3, options={"hidden": (20,)})
    trained = library.model(config, DATA, images, 1)
    assert library.model(config, DATA, images, 2) is trained  # whatever the trial's seed
    accuracy = library.accuracy(config, DATA, images)
    assert accuracy["accuracy"] > 0.5
    assert accuracy["accuracy_on"] == "359 test images"
    monkeypatch.setattr(library_module, "train_model", lambda *_: pytest.fail("trained again"))
    fresh = Library(data=None, cache=tmp_path / "cache")
    read = fresh.model(config, DATA, images, 1)
    assert all(torch.equal(a, b) for a, b in zip(trained.state_dict().values(), read.state_dict().values()))


def test_what_a_model_depends_on_is_in_its_name(library):
    images = library.images("digits", "train", DATA)
    for epochs, trained_on in ((1, 64), (2, 64), (1, 32)):
        data = RowData(name="digits", size=8, batch_size=2, trained_on=trained_on)
        library.model(ModelConfig(name="fcn3", epochs=epochs, options={"hidden": (5,)}), data, images, 0)
    assert len(list((library.cache / "models").glob("fcn3-*.safetensors"))) == 3


def test_weights_are_found_by_the_start_of_their_name(shared_data):
    library = Library(data=shared_data)
    data = RowData(name="cifar10", batch_size=2)
    images = library.images("cifar10", "test", data)
    model = library.model(ModelConfig(name="resnet20", weights="cifar10_resnet20"), data, images, 0)
    assert model.state_dict()["linear.weight"].shape == (10, 64)
