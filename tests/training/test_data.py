import hashlib
import pickle
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from ddp_core.catalog import DATASETS, count_image_folder
from ddp_core.config import TrainingConfig
from ddp_core.errors import UserError
from ddp_core.training import data as training_data
from ddp_core.training.data import DIGITS, ImageTensors, SyntheticImages, open_data, size_of
from ddp_core.training.distributed import World
from ddp_core.training.loading import EpochSampler, ExactSampler, micro_batches, rank_seed, train_loader, val_loader

IMAGES, LABELS = 12, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


class OneRank(World):
    """A world of one, without a process group."""

    def prepare_on_rank_zero(self, prepare):
        return prepare(True)


def world(rank=0, size=1):
    return OneRank(rank, rank, size, torch.device("cpu"), control=None)


def config(**values):
    return TrainingConfig(**values)


def sampler(count, rank, ranks, **options):
    return EpochSampler(range(count), ranks, rank, **options)


# --- data sets ---


def test_digits_are_as_the_catalog_says_with_every_digit_in_the_validation_set():
    facts = DATASETS["digits"]
    data = open_data(config(), world())
    assert (size_of(data.train), size_of(data.val), data.shape, data.classes) == (
        facts.train, facts.val, facts.shape, facts.classes,
    )  # fmt: skip
    assert torch.bincount(data.val.labels).tolist() == [36] * 10
    images, labels = data.train.__getitems__(list(range(size_of(data.train))))
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.mean().abs() < 0.01
    assert (images.std() - 1).abs() < 0.01


def test_no_digit_is_in_both_parts():
    with np.load(DIGITS) as file:
        train = {image.tobytes() for image in file["train_images"]}
        val = {image.tobytes() for image in file["val_images"]}
        assert file["train_images"].max() == 16
    assert not train & val


def test_a_batch_equals_its_images_one_by_one():
    train = open_data(config(), world()).train
    images, labels = train.__getitems__([5, 3, 9])
    for at, index in enumerate([5, 3, 9]):
        image, label = train[index]
        assert torch.equal(images[at], image)
        assert labels[at] == label


def test_images_are_resized_on_demand():
    data = open_data(config(image_size=20), world())
    assert data.shape == (1, 20, 20)
    assert data.train[0][0].shape == (1, 20, 20)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_files_are_read_without_a_network(name, tmp_path):
    folder = tmp_path / {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[name] / "raw"
    folder.mkdir(parents=True)
    pixels = np.arange(IMAGES * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(IMAGES, 28, 28)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, IMAGES, 28, 28) + pixels.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, IMAGES) + bytes(LABELS))
    data = open_data(config(dataset=name, data_dir=str(tmp_path)), world())
    assert (data.shape, data.classes) == (DATASETS[name].shape, DATASETS[name].classes)
    assert size_of(data.train) == size_of(data.val) == IMAGES
    image, label = data.train[3]
    mean, std = training_data._MNIST_STATS if name == "mnist" else training_data._FASHION_STATS
    assert torch.allclose(image * std[0] + mean[0], torch.from_numpy(pixels[3]) / 255, atol=1e-6)
    assert label == 3


def test_cifar10_files_are_read_without_a_network(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    written = {}
    for name in [n for n, _ in CIFAR10.train_list + CIFAR10.test_list]:
        written[name] = rng.integers(0, 256, (IMAGES, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": written[name], "labels": LABELS}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))

    def checksum(name):
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    monkeypatch.setattr(CIFAR10, "train_list", [(n, checksum(n)) for n, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [(n, checksum(n)) for n, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": checksum("batches.meta")})
    data = open_data(config(dataset="cifar10", data_dir=str(tmp_path)), world())
    assert (data.shape, data.classes) == (DATASETS["cifar10"].shape, DATASETS["cifar10"].classes)
    assert (size_of(data.train), size_of(data.val)) == (5 * IMAGES, IMAGES)
    image, label = data.train[IMAGES + 4]  # of the second file
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in training_data._CIFAR_STATS)
    expected = torch.from_numpy(written["data_batch_2"][4]).view(3, 32, 32) / 255
    assert torch.allclose(image * std + mean, expected, atol=1e-6)
    assert label == 4


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_a_download_that_fails_is_one_sentence(name, tmp_path, monkeypatch):
    from torchvision import datasets

    nowhere = "http://127.0.0.1:9/"
    monkeypatch.setattr(datasets.MNIST, "mirrors", [nowhere])
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [nowhere])
    monkeypatch.setattr(datasets.CIFAR10, "url", nowhere)
    with pytest.raises(UserError, match="could not be downloaded") as caught:
        open_data(config(dataset=name, data_dir=str(tmp_path)), world())
    assert caught.value.field == "training.dataset"
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def image_folder(root: Path, classes=("ant", "bee"), parts=("train", "val"), count=3) -> Path:
    rng = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def test_an_image_folder_is_read_and_counted_as_the_catalog_counts(tmp_path):
    image_folder(tmp_path)
    data = open_data(config(dataset="image_folder", data_dir=str(tmp_path), image_size=16), world())
    assert (data.shape, data.classes) == ((3, 16, 16), 2)
    assert (size_of(data.train), data.classes) == count_image_folder(tmp_path / "train")
    image, label = data.train[5]
    assert image.shape == (3, 16, 16)
    assert image.dtype == torch.float32
    assert label == 1


def test_an_image_folder_that_does_not_fit_is_said(tmp_path):
    def problem():
        with pytest.raises(UserError) as caught:
            open_data(config(dataset="image_folder", data_dir=str(tmp_path)), world())
        assert caught.value.field == "training.data_dir"
        return str(caught.value)

    assert f"no folder {tmp_path / 'train'}" in problem()
    image_folder(tmp_path, parts=("train",))
    assert f"no folder {tmp_path / 'val'}" in problem()
    image_folder(tmp_path, classes=("ant", "wasp"), parts=("val",))
    assert "bee, wasp" in problem()
    (tmp_path / "train" / "empty").mkdir()
    assert "empty" in problem()


def test_synthetic_images_are_the_same_everywhere_and_their_classes_can_be_told():
    data = open_data(config(dataset="synthetic", synthetic_samples=200, image_size=16), world())
    again = open_data(config(dataset="synthetic", synthetic_samples=200, image_size=16), world())
    assert (size_of(data.train), size_of(data.val), data.shape) == (200, 20, (3, 16, 16))
    assert torch.equal(data.train[7][0], again.train[7][0])
    assert not torch.equal(data.train[7][0], data.train[17][0])
    assert not torch.equal(data.train[0][0], data.val[0][0])
    # The nearest mean of the training images' classes: learnable, if that gets most of them right.
    images, labels = (torch.stack([torch.as_tensor(x[i]) for x in data.train]) for i in (0, 1))
    means = torch.stack([images[labels == c].mean(0) for c in range(10)])
    right = sum(int((means - image).square().flatten(1).sum(1).argmin()) == label for image, label in data.val)
    assert right >= 18
    with pytest.raises(IndexError):
        data.val[20]


def test_the_smallest_synthetic_set_has_something_to_validate():
    assert size_of(open_data(config(dataset="synthetic", synthetic_samples=2), world()).val) == 1


# --- how they are split ---


@pytest.mark.parametrize("count", [1, 3, 7, 64, 997])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_split_is_torchs(count, ranks, shuffle):
    for rank in range(ranks):
        ours = sampler(count, rank, ranks, shuffle=shuffle, seed=3)
        theirs = DistributedSampler(range(count), ranks, rank, shuffle=shuffle, seed=3)
        ours.begin(epoch=2)
        theirs.set_epoch(2)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


def test_without_shuffling_the_samples_are_dealt_out_in_turn():
    dealt = [list(sampler(1000, rank, 4, shuffle=False)) for rank in range(4)]
    assert [indices[:3] for indices in dealt] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert sorted(chain(*dealt)) == list(range(1000))


def test_each_epoch_has_an_order_of_its_own():
    one = sampler(100, 0, 4)
    orders = []
    for epoch in (1, 2, 1):
        one.begin(epoch)
        orders.append(list(one))
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


@pytest.mark.parametrize(("count", "ranks", "batches"), [(64, 2, 3), (61, 4, 2), (61, 4, 4)])
def test_an_epoch_goes_on_where_it_was_left(count, ranks, batches):
    for rank in range(ranks):
        one = sampler(count, rank, ranks)
        one.begin(3)
        whole = list(one)
        one.begin(3, consumed=batches * 4 * ranks)
        assert list(one) == whole[batches * 4 :]
        assert len(one) == len(whole[batches * 4 :])


def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left():
    before = [list(sampler(64, rank, 4))[:3] for rank in range(4)]
    after = []
    for rank in range(2):
        one = sampler(64, rank, 2)
        one.begin(0, consumed=12)
        after += list(one)
    assert sorted(chain(*before, after)) == list(range(64))


@pytest.mark.parametrize("count", [1, 7, 997])
def test_validation_deals_out_every_sample_exactly_once(count):
    dealt = [list(ExactSampler(count, rank, 4)) for rank in range(4)]
    assert sorted(chain(*dealt)) == list(range(count))


# --- loaders ---


def test_every_rank_has_equally_many_batches():
    data = open_data(config(), world())
    lengths = {len(list(train_loader(data, config(batch_size=10), world(rank, 4))[0])) for rank in range(4)}
    assert lengths == {36}


def test_loading_leaves_the_ranks_random_numbers_alone():
    data = open_data(config(dataset="synthetic", synthetic_samples=20), world())
    before = torch.get_rng_state()
    for loader in (train_loader(data, config(), world())[0], val_loader(data, config(), world())):
        list(loader)
    assert torch.equal(before, torch.get_rng_state())


class Seeds(Dataset):
    """Gives the seed of the process that loads."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(1), torch.initial_seed()


def test_loader_workers_have_seeds_of_their_own_by_rank_and_worker():
    seeds = []
    for rank in range(2):
        data = training_data.Data(Seeds(), Seeds(), (1, 1, 1), 1)
        loader, _ = train_loader(data, config(num_workers=2, batch_size=2), world(rank, 2))
        seeds += [seed for _, batch in loader for seed in set(batch.tolist())]
    assert len(set(seeds)) == 4  # two ranks of two workers


def test_ranks_have_seeds_of_their_own_even_in_runs_of_neighbouring_seeds():
    assert len({rank_seed(seed, rank) for seed in range(20) for rank in range(20)}) == 400


def test_pixels_stay_bytes_until_they_are_asked_for():
    images = ImageTensors(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), ((0.0,), (1.0,)))
    assert images.images.dtype == torch.uint8
    assert isinstance(SyntheticImages(2, (1, 2, 2), 0)[0][1], int)


# --- the batches of an optimizer step ---


@pytest.mark.parametrize(
    ("samples", "accumulation", "shares"),
    [
        (8, 1, [1, 1, 1, 1]),
        (8, 2, [1 / 2, 1 / 2, 1 / 2, 1 / 2]),
        (7, 2, [1 / 2, 1 / 2, 2 / 3, 1 / 3]),  # a last batch of one sample weighs as one
        (6, 2, [1 / 2, 1 / 2, 1]),  # a last step of one batch
        (3, 4, [2 / 3, 1 / 3]),
    ],
)
def test_a_batch_weighs_in_its_step_as_much_as_it_has_samples(samples, accumulation, shares):
    data = training_data.Data(SyntheticImages(samples, (1, 4, 4), 0), None, (1, 4, 4), 10)
    loader, order = train_loader(data, config(batch_size=2, accumulation=accumulation), world())
    order.begin(1)
    batches = list(micro_batches(loader, len(order), accumulation))
    assert [batch.share for batch in batches] == pytest.approx(shares)
    steps = -(-len(shares) // accumulation)
    assert sum(batch.share for batch in batches) == pytest.approx(steps)
    assert sum(batch.last for batch in batches) == sum(batch.first for batch in batches) == steps
    assert batches[0].first
    assert batches[-1].last
    assert sum(batch.samples for batch in batches if batch.last) == samples


def test_drop_last_leaves_out_the_end_of_the_order_and_pads_nothing():
    parts = [list(sampler(11, rank, 4, shuffle=False, drop_last=True)) for rank in range(4)]
    assert parts == [[0, 4], [1, 5], [2, 6], [3, 7]]
    theirs = [list(DistributedSampler(range(11), 4, rank, shuffle=False, drop_last=True)) for rank in range(4)]
    assert parts == theirs
    assert [len(sampler(11, rank, 4, shuffle=False, drop_last=True)) for rank in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "ranks"), [(1000, 4), (997, 4), (7, 4), (8, 2), (5, 3)])
def test_the_form_is_told_how_the_sampler_splits(count, ranks, drop_last):
    told = training_data.split(count, ranks, 2, drop_last=drop_last)
    parts = [list(sampler(count, rank, ranks, shuffle=False, drop_last=drop_last)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {told.per_rank}
    assert [told.first_indices(rank) for rank in range(ranks)] == [part[:4] for part in parts]
    everything = list(chain(*parts))
    assert len(everything) - len(set(everything)) == told.padded
    assert count - len(set(everything)) == told.dropped


def test_a_thousand_unshuffled_samples_on_four_ranks_are_dealt_out_in_turn():
    told = training_data.split(1000, 4, 10)
    assert [told.first_indices(rank, 3) for rank in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert (told.padded, told.dropped, told.per_rank, told.steps_per_epoch) == (0, 0, 250, 25)
