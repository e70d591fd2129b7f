"""train_cifar.py: its pieces against their definitions, its refusals, and whole runs that are killed and resumed.

What is compared: augmentation with a loop in plain Python; the order of training and the evaluation on 1 to 4 ranks with one
rank; folders and files of CIFAR-10 with the arrays they were written from; the weights on disk with torchvision's own model;
four epochs straight with two, a kill -9, and two more, bit for bit; the built-in images with what their comment promises.
Data is made up: 26 images in three classes. Needs no network and no GPU. About 50 s; with `-m sweep` two epochs of the built-in
images and more kinds of runs that are killed, 3 minutes.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from models import refused
from PIL import Image

import train_cifar as cifar
import train_glue as glue

ROOT = Path(cifar.__file__).resolve().parent

# ---- data that is made up here -------------------------------------------------------------------------------------


def _pictures(n, seed):
    """(n, 32, 32, 3) uint8, not two pixels alike."""
    return np.random.default_rng(seed).integers(256, size=(n, 32, 32, 3), dtype=np.uint8)


def _write_folder(where, train, test, classes=("ant", "bee", "cow")):
    """Image k of a split is of class k modulo their number, and number k // classes in its folder."""
    for split, n in (("train", train), ("test", test)):
        for name in classes:
            (where / split / name).mkdir(parents=True, exist_ok=True)
        for k, picture in enumerate(_pictures(n, len(split))):
            name = classes[k % len(classes)]
            Image.fromarray(picture).save(where / split / name / f"{k // len(classes):03d}.png")
    return where


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return _write_folder(tmp_path_factory.mktemp("images"), 26, 11)


def _batch_files(images=4):
    """CIFAR-10 as torchvision stores it, with few images: file name -> (content, number of the first image)."""
    files = {}
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        data = _pictures(images, k).transpose(0, 3, 1, 2).reshape(images, 3072)
        files[name] = pickle.dumps({"data": data, "labels": [(k + i) % 10 for i in range(images)]})
    files["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")})
    return files


def _write_batches(where):
    folder = where / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in _batch_files().items():
        (folder / name).write_bytes(content)


@contextlib.contextmanager
def _known_checksums():
    """torchvision checks each file's md5 against that of the real one; here, against those of the files made up above. The
    check itself stays as it is."""
    from torchvision.datasets import CIFAR10
    sums = {name: hashlib.md5(content).hexdigest() for name, content in _batch_files().items()}
    with mock.patch.multiple(CIFAR10, train_list=[[f"data_batch_{i}", sums[f"data_batch_{i}"]] for i in range(1, 6)],
                             test_list=[["test_batch", sums["test_batch"]]],
                             meta={"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]}):
        yield


# ---- order and augmentation ----------------------------------------------------------------------------------------


def test_augmentation_equals_a_loop():
    """Padded with 4 black pixels, mirrored, then cut, as torchvision's Pad, RandomHorizontalFlip and RandomCrop do."""
    images = torch.from_numpy(_pictures(7, 0)).permute(0, 3, 1, 2).contiguous()
    flips = [False, True, True, False, True, False, True]
    corners = [(0, 0), (0, 0), (8, 8), (4, 4), (4, 4), (1, 7), (3, 6)]
    expected = torch.zeros(7, 3, 32, 32)
    for n in range(7):
        for y in range(32):
            for x in range(32):
                row, column = y + corners[n][0] - 4, x + corners[n][1] - 4
                if flips[n]:
                    column = 31 - column
                if 0 <= row < 32 and 0 <= column < 32:
                    expected[n, :, y, x] = images[n, :, row, column].float() / 255
    found = cifar.augment(images, torch.tensor(flips), torch.tensor(corners))
    assert torch.equal(found, expected)
    assert torch.equal(found[3], cifar.scaled(images)[3]) and torch.equal(found[4], cifar.scaled(images)[4].flip(-1))
    assert found[0, :, :4].max() == 0 and found[2, :, -4:].max() == 0  # black: the corners reach over the edge


def test_order_flips_and_crops_do_not_depend_on_the_ranks():
    whole = cifar.plan_epoch(101, 12, 3, 1, 0, 1)
    assert [part.shape for part in whole] == [(8, 12), (8, 12), (8, 12, 2)]
    assert len(set(whole[0].ravel())) == 96  # nothing twice; the last 5 of 101 are no batch
    assert 0.3 < whole[1].mean() < 0.7 and set(whole[2].ravel()) == set(range(9))
    for ranks in (1, 2, 3, 4):
        parts = [cifar.plan_epoch(101, 12, 3, 1, rank, ranks) for rank in range(ranks)]
        for kind, expected in enumerate(whole):
            np.testing.assert_array_equal(np.concatenate([part[kind] for part in parts], axis=1), expected)
    for other in (cifar.plan_epoch(101, 12, 3, 2, 0, 1), cifar.plan_epoch(101, 12, 4, 1, 0, 1)):
        assert all((other[kind] != whole[kind]).any() for kind in range(3))
    everything = cifar.plan_epoch(96, 12, 3, 1, 0, 1)[0]
    assert sorted(everything.ravel()) == list(range(96))


def test_batches_are_the_images_of_the_plan(folder):
    split = cifar.read_folder(folder)["train"]
    rows, flips, corners = cifar.plan_epoch(26, 8, 0, 5, 1, 2)
    batches = list(cifar.training_batches(split, 8, 0, 5, 1, 2))
    assert len(batches) == 3
    for k, (images, labels) in enumerate(batches):
        assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
        assert labels.tolist() == split[1][rows[k]].tolist()
        assert torch.equal(images, cifar.augment(split[0][rows[k]], torch.tensor(flips[k]), torch.tensor(corners[k])))


def _epoch_of_images(batch_size):
    """What all ranks together see in an epoch, sorted."""
    import torch.distributed as dist
    split = torch.arange(23 * 3 * 32 * 32).remainder(251).to(torch.uint8).view(23, 3, 32, 32), torch.arange(23)
    seen = [None] * dist.get_world_size()
    batches = cifar.training_batches(split, batch_size, 1, 0, dist.get_rank(), dist.get_world_size())
    dist.all_gather_object(seen, [(labels.tolist(), images.sum((1, 2, 3)).tolist()) for images, labels in batches])
    steps = zip(*seen, strict=True)  # as many on every rank
    return [sorted(pair for labels, sums in parts for pair in zip(labels, sums, strict=True)) for parts in steps]


def test_every_number_of_ranks_sees_the_same_images(pool):
    expected, = pool.run(1, _epoch_of_images, 11)
    assert [len(step) for step in expected] == [11, 11]  # 2b + 1 images: CASES 34
    expected, = pool.run(1, _epoch_of_images, 12)
    for ranks in (2, 3, 4):
        assert pool.run(ranks, _epoch_of_images, 12) == [expected] * ranks


# ---- evaluation ------------------------------------------------------------------------------------------------------


class Reads(torch.nn.Module):
    """Says of an image what its first pixel says, on a scale that depends on nothing else."""

    def forward(self, images):
        assert not torch.is_grad_enabled() and not self.training
        return torch.nn.functional.one_hot((images[:, 0, 0, 0] * 255).round().long(), 10) * 3.0


def _evaluate_reads(sizes, unit):
    import torch.distributed as dist
    found = []
    for n in sizes:
        labels = torch.arange(n) % 10
        images = torch.zeros(n, 3, 32, 32, dtype=torch.uint8)
        images[:, 0, 0, 0] = torch.where(torch.arange(n) < 2, labels + 1, labels)  # images 0 and 1 are read wrongly
        with mock.patch.object(cifar, "UNIT", unit):
            found.append(cifar.evaluate(Reads(), (images, labels), dist.get_rank(), dist.get_world_size()))
    return found


@pytest.mark.parametrize("unit", [3, 100])
def test_every_image_counts_once(pool, unit):
    """CASES 35: of 10 images on 4 ranks 0.8 are right; counting the repeated leading ones would give 0.667."""
    sizes = (1, 5, 10, 11, 33)
    expected, = pool.run(1, _evaluate_reads, sizes, unit)
    assert [e["accuracy"] for e in expected] == [max(n - 2, 0) / n for n in sizes] and expected[2]["accuracy"] == 0.8
    assert all(type(e["accuracy"]) is type(e["loss"]) is float for e in expected)
    right, wrong = np.log(np.exp(3) + 9) - 3, np.log(np.exp(3) + 9)
    assert expected[2]["loss"] == pytest.approx((8 * right + 2 * wrong) / 10, rel=1e-6)  # fp32
    for ranks in (2, 3, 4):
        assert pool.run(ranks, _evaluate_reads, sizes, unit) == [expected] * ranks


def _evaluate_resnet(folder):
    import torch.distributed as dist
    torch.manual_seed(0)
    model = cifar.build_model("resnet18", "imagenet", 3)
    split = cifar.read_folder(Path(folder))["test"]
    with mock.patch.object(cifar, "UNIT", 4):
        return [cifar.evaluate(model, split, dist.get_rank(), dist.get_world_size(), half) for half in (None, torch.bfloat16)]


def test_loss_and_accuracy_are_equal_to_the_last_digit_on_1_to_4_ranks(pool, folder):
    expected, = pool.run(1, _evaluate_resnet, str(folder))
    for ranks in (2, 3, 4):
        assert pool.run(ranks, _evaluate_resnet, str(folder)) == [expected] * ranks


# ---- data: folders, files, download -----------------------------------------------------------------------------------


def test_folder_of_images(folder):
    data = cifar.read_folder(folder)
    for split, n in (("train", 26), ("test", 11)):
        images, labels = data[split]
        order = sorted(range(n), key=lambda k: (k % 3, k))  # class by class
        assert labels.tolist() == [k % 3 for k in order] and labels.dtype == torch.int64
        assert images.dtype == torch.uint8 and images.is_contiguous()
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), _pictures(n, len(split))[order])


def test_gray_images_have_three_channels(tmp_path):
    _write_folder(tmp_path, 4, 4, ("a", "b"))
    Image.fromarray(_pictures(1, 0)[0, :, :, 0]).save(tmp_path / "test" / "a" / "000.png")
    images, _ = cifar.read_folder(tmp_path)["test"]
    assert (images[0] == torch.from_numpy(_pictures(1, 0)[0, :, :, 0])).all()


def test_cifar10_as_torchvision_stores_it(tmp_path):
    _write_batches(tmp_path)
    with _known_checksums():
        data = cifar.read_cifar10(str(tmp_path), download=False)
        for split, files in (("train", range(5)), ("test", (5,))):
            images, labels = data[split]
            assert images.dtype == torch.uint8 and images.is_contiguous()
            np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), np.concatenate([_pictures(4, k) for k in files]))
            assert labels.tolist() == [(k + i) % 10 for k in files for i in range(4)]
    with pytest.raises(cifar.Stop, match="damaged or incomplete, remove it .*cifar-10-batches-py|cifar-10-batches-py: damaged"):
        cifar.read_cifar10(str(tmp_path), download=False)  # the md5 are those of the real files again


class Peek(Exception):
    """Stands in for an engine: hands out the model it is given, and ends the run."""

    def __init__(self, model, params, **knobs):
        raise Peek.Seen(model)

    class Seen(Exception):
        pass


def _prepare(folder, fail_on, online=True, argv=()):
    """The whole run up to the engine, on two nodes of two ranks, whose folders are FOLDER/node-0 and -1. The download takes a
    while. What was printed, or what Stop says."""
    import torch.distributed as dist
    from torchvision.datasets import cifar as module
    rank = dist.get_rank()
    node = Path(folder) / f"node-{rank // 2}"

    def download(url, root, **_):
        assert url == module.CIFAR10.url and Path(root) == node
        (Path(folder) / f"download-{rank}").touch()
        time.sleep(0.3)
        if rank == fail_on:
            raise OSError("disk full")
        _write_batches(node)

    args = cifar.parse(["--batch_size", "2", "-i", "0", *argv])
    out = io.StringIO()
    try:
        with mock.patch.dict(os.environ, LOCAL_RANK=str(rank % 2), DATA=str(node)), _known_checksums(), \
                mock.patch.object(cifar, "answers", lambda url: online), contextlib.redirect_stdout(out), \
                mock.patch.object(cifar, "builtin_data", lambda: dict.fromkeys(("train", "test"), cifar.builtin_images(20, 1))), \
                mock.patch.object(module, "download_and_extract_archive", download):
            cifar.run(args, Peek, {}, torch.device("cpu"))
    except Peek.Seen:
        return out.getvalue()
    except cifar.Stop as stop:
        return str(stop), stop.status


def test_download_happens_once_per_node_and_its_failure_ends_all(pool, tmp_path):  # CASES 78
    for fail_on in (0, 2):
        assert pool.run(4, _prepare, str(tmp_path), fail_on) == [
            (f"{tmp_path / f'node-{fail_on // 2}'}: the download of CIFAR-10 failed: OSError: disk full", 1)] * 4
        assert {f.name for f in tmp_path.glob("download-*")} == {"download-0", "download-2"}  # ranks 1 and 3 never tried
        for f in tmp_path.glob("node-*/cifar*/*"):
            f.unlink()
        for f in tmp_path.glob("node-*/cifar*py"):
            f.rmdir()
    for f in tmp_path.glob("download-*"):
        f.unlink()
    said = pool.run(4, _prepare, str(tmp_path), None)
    assert "20 training and 4 test images" in said[0] and said[1:] == [""] * 3
    assert {f.name for f in tmp_path.glob("download-*")} == {"download-0", "download-2"}
    for f in tmp_path.glob("download-*"):
        f.unlink()
    said = pool.run(4, _prepare, str(tmp_path), None, online=False)  # the files are there now
    assert "20 training and 4 test images" in said[0] and not list(tmp_path.glob("download-*"))


def test_nodes_with_different_folders(pool, tmp_path):
    """All ranks come to the same decision, whoever has what."""
    said = pool.run(4, _prepare, str(tmp_path), None, online=False)
    assert "NOT that of CIFAR-10" in said[0] and f"looked in {tmp_path / 'node-0'}: there is no folder" in said[0]
    assert "built-in images: 20 training and 20 test images" in said[0] and said[1:] == [""] * 3
    _write_folder(tmp_path / "node-0", 12, 4)
    message = f"{tmp_path}/node-{{}}: ranks find different things there: 0: folder, 1: folder, 2: no images, 3: no images"
    assert pool.run(4, _prepare, str(tmp_path), None) == [(message.format(rank // 2), 2) for rank in range(4)]
    _write_folder(tmp_path / "node-1", 12, 4)
    assert "12 training and 4 test images" in pool.run(4, _prepare, str(tmp_path), None)[0]
    Image.fromarray(_pictures(1, 9)[0]).save(tmp_path / "node-1" / "test" / "ant" / "000.png")
    for message, status in pool.run(4, _prepare, str(tmp_path), None):
        assert status == 2 and "ranks have read different images there; checksums are 0: " in message


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refused(capsys, *argv, status=2) -> str:
    return refused(cifar, capsys, argv, status)[-1]


REFUSALS = {
    "unknown option": (["--bach_size", "3"], "--bach_size"),
    "unknown model": (["--model", "resnet50"], "resnet50"),
    "batch of nothing": (["--batch_size", "0"], "--batch_size must be at least 1, got 0"),
    "no epoch": (["--epochs", "0"], "--epochs must be at least 1, got 0"),
    "negative rate": (["--lr", "-1"], "--lr must be between 0 and inf, got -1.0"),
    "negative interval": (["-i", "-1"], "--interval must be between 0 and inf, got -1"),
    "percent": (["--target_acc", "93"], "--target_acc must be between 0 and 1, got 93.0"),
    "stem of a vit": (["--model", "vit", "--stem", "cifar"], "--model vit has no stem to choose"),
    "batch norm of a vit": (["--model", "vit", "--sync_bn"], "--model vit has no batch normalisation to synchronise"),
    "both": (["--eval", "-r", "3"], "give one of them"),
    "epoch of nothing": (["-e", "3"], "-e is the epoch of --eval; to go on with training give -r"),
    "epoch 0": (["-r", "0"], "--resume must be at least 1, got 0"),
    "micro-batches": (["--batch_size", "4", "--micro_batches", "5"], "--micro_batches 5 is more than the 4 images of a rank"),
    "one image to a piece": (["--batch_size", "7", "--micro_batches", "4"], "7 in 4 pieces leaves one image to a piece"),
    "mode": (["-p", "zero3"], "zero3"),
    "unknown knob": (["--engine", "bucket_gb=1"], "bucket_mb"),
    "offload": (["--offload"], "--offload: mode ddp has no such option"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case, capsys):
    argv, message = REFUSALS[case]
    assert message in _refused(capsys, *argv)


def test_refused_folders(capsys, tmp_path):
    assert f"there is no folder {tmp_path / 'none'}" in _refused(capsys, "--data", tmp_path / "none")
    (tmp_path / "images.zip").touch()
    assert "images.zip: that is a file; unpack it and give the folder" in _refused(capsys, "--data", tmp_path / "images.zip")
    message = _refused(capsys, "--data", tmp_path)
    assert f"neither cifar-10-batches-py/ nor train/ and test/ in it; {tmp_path} contains images.zip" in message
    (tmp_path / "cifar-10-batches-py").mkdir()
    message = _refused(capsys, "--data", tmp_path, "-i", 0)
    assert f"{tmp_path / 'cifar-10-batches-py'}: damaged or incomplete, remove it to have it downloaded again" in message


def test_refused_images(capsys, tmp_path):
    argv = ("--data", tmp_path, "--batch_size", 2, "-i", 0)
    _write_folder(tmp_path, 6, 6)
    file = tmp_path / "test" / "cow" / "001.png"
    Image.fromarray(np.zeros((48, 31, 3), np.uint8)).save(file)
    assert f"{file}: 31 x 48 pixels instead of 32 x 32" in _refused(capsys, *argv)
    Image.fromarray(_pictures(1, 0)[0]).save(file)
    whole = file.read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        file.write_bytes(content)
        assert f"{file}: cannot be read: " in _refused(capsys, *argv)
    file.unlink()
    (tmp_path / "test" / "cow" / "000.png").unlink()
    assert "Found no valid file for the classes cow" in _refused(capsys, *argv)
    (tmp_path / "test" / "cow").rmdir()
    assert "must have the same classes; only one of them has cow" in _refused(capsys, *argv)
    _write_folder(tmp_path / "many", 11, 11, [f"class {k}" for k in range(11)])
    assert "2 to 10 classes are possible, train/ has 11 folders" in _refused(capsys, "--data", tmp_path / "many", *argv[2:])
    _write_folder(tmp_path / "one", 2, 2, ["all"])
    assert "2 to 10 classes are possible, train/ has 1 folders" in _refused(capsys, "--data", tmp_path / "one", *argv[2:])


def test_refused_checkpoint_folders(capsys, tmp_path, folder):
    argv = ("--data", folder, "--batch_size", 4)
    message = _refused(capsys, *argv, "-c", tmp_path, "-r", 3)
    assert f"-r 3: there is no checkpoint in {tmp_path / 'optimizer_3'}; {tmp_path} has none" in message
    message = _refused(capsys, *argv, "-c", tmp_path, "--eval")
    assert f"--eval: there is no {tmp_path / 'model_80.pth'}; {tmp_path} has none" in message
    (tmp_path / "file").touch()  # found out before the first epoch
    assert f"-c {tmp_path / 'file'}: [Errno 17] File exists" in _refused(capsys, *argv, "-c", tmp_path / "file")


# ---- model -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_stems(stem):
    """CASES 82: with torchvision's stem the last feature maps are single pixels."""
    torch.manual_seed(0)
    model = cifar.build_model("resnet18", stem, 10)
    sizes = {}
    for name in ("layer1", "layer4"):
        getattr(model, name).register_forward_hook(lambda _, __, output, name=name: sizes.update({name: tuple(output.shape[2:])}))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == {"imagenet": {"layer1": (8, 8), "layer4": (1, 1)}, "cifar": {"layer1": (32, 32), "layer4": (4, 4)}}[stem]
    weight = model.conv1.weight
    fan_out = 64 * weight.shape[2] * weight.shape[3]
    assert weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)  # of 9408 or 1728 normal numbers


def test_vit():
    model = cifar.build_model("vit", None, 7)
    output = model(torch.zeros(2, 3, 32, 32))
    assert output.logits.shape == (2, 7) and model.vit.embeddings.patch_embeddings.num_patches == 64
    assert not any(m.p for m in model.modules() if isinstance(m, torch.nn.Dropout))
    loss = cifar.loss_fn(output, (None, torch.tensor([0, 3])))
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(output.logits, torch.tensor([0, 3])).item())


# ---- runs in this process ------------------------------------------------------------------------------------------


def _result(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def _main(capsys, *argv) -> tuple[dict, str]:
    cifar.main([str(a) for a in argv])
    text = capsys.readouterr().out
    return _result(text), text


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Two epochs of 3 steps on one rank: the checkpoints' folder, and the run's JSON line."""
    where = tmp_path_factory.mktemp("run") / "nested" / "checkpoint"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cifar.main(["--data", str(folder), "-c", str(where), "--epochs", "2", "-i", "1", "--batch_size", "8"])
    return where, _result(out.getvalue())


def test_files_and_json_line(finished):
    where, result = finished
    assert sorted(f.name for f in where.iterdir()) == sorted(
        name.format(e) for name in ("model_{}.pth", "lr_scheduler_{}.pth", "optimizer_{}") for e in (1, 2))
    expected = {"model": "resnet18", "stem": "imagenet", "mode": "ddp", "precision": "fp32", "world_size": 1, "data": "folder",
                "classes": 3, "epochs": 2}
    assert expected.items() <= result.items()
    assert result["samples_per_second"] > 0 and result["loss"] > 0 and result["train_loss"] > 0
    assert round(result["accuracy"] * 11) == pytest.approx(result["accuracy"] * 11)
    assert torch.load(where / "lr_scheduler_2.pth", weights_only=True)["last_epoch"] == 2


def test_weights_load_into_torchvisions_own_model(finished, folder):
    """strict, and then by hand: the accuracy that the run has printed."""
    from torchvision.models import resnet18
    where, result = finished
    model = resnet18(num_classes=3)
    model.load_state_dict(torch.load(where / "model_2.pth", weights_only=True), strict=True)
    images, labels = cifar.read_folder(folder)["test"]
    with torch.no_grad():
        answers = model.eval()(images.float() / 255).argmax(1)
    assert (answers == labels).float().mean().item() == pytest.approx(result["accuracy"])
    assert model.bn1.num_batches_tracked == 6


def test_eval_has_the_same_numbers(finished, folder, capsys):
    where, expected = finished
    result, _ = _main(capsys, "--data", folder, "-c", where, "--eval", "-e", 2)
    assert {k: result[k] for k in ("epochs", "accuracy", "loss")} == {k: expected[k] for k in ("epochs", "accuracy", "loss")}
    assert result["samples_per_second"] is None and result["train_loss"] is None
    message = _refused(capsys, "--data", folder, "-c", where, "--eval", "-e", 2, "--target_acc", 1.0, status=1)
    assert f"accuracy {expected['accuracy']} is below the target 1.0" in message
    assert "there is no" in (message := _refused(capsys, "-c", where, "--eval")) and "has those of epochs 1, 2" in message
    message = _refused(capsys, "--data", folder, "-c", where, "--eval", "-e", 2, "--stem", "cifar")
    assert "is not of resnet18 with the cifar stem and 3 classes: conv1.weight is (64, 3, 7, 7) instead of (64, 3, 3, 3)" in message
    assert "is not of vit and 3 classes" in _refused(capsys, "--data", folder, "-c", where, "--eval", "-e", 2, "--model", "vit")


def test_eval_of_damaged_files(finished, folder, tmp_path, capsys):
    argv = ("--data", folder, "-c", tmp_path, "--eval", "-e", 1)
    whole = (finished[0] / "model_1.pth").read_bytes()
    for content in (b"", whole[:1000], whole[:-1000]):
        (tmp_path / "model_1.pth").write_bytes(content)
        assert f"{tmp_path / 'model_1.pth'}: cannot be read: " in _refused(capsys, *argv)
    torch.save([1, 2], tmp_path / "model_1.pth")
    assert "is not of resnet18 with the imagenet stem and 3 classes" in _refused(capsys, *argv)


def test_resume_past_the_last_epoch_only_evaluates(finished, folder, capsys):
    where, expected = finished
    before = sorted(f.stat().st_mtime_ns for f in where.iterdir())
    result, text = _main(capsys, "--data", folder, "-c", where, "-r", 2, "--epochs", 2, "--batch_size", 8)
    assert "--epochs 2 is not past epoch 2: nothing to train, only evaluating the checkpoint" in text
    assert {k: result[k] for k in ("epochs", "accuracy", "loss")} == {k: expected[k] for k in ("epochs", "accuracy", "loss")}
    assert result["samples_per_second"] is None and before == sorted(f.stat().st_mtime_ns for f in where.iterdir())


def test_resume_with_other_settings(finished, folder, tmp_path, capsys):
    """CASES 44. Each setting is named with both values, before anything is built or loaded."""
    where, _ = finished
    argv = ("--data", folder, "-c", where, "-r", 1, "--epochs", 2, "--batch_size", 8)
    for option, message in {
        "--model vit": "model was resnet18, is vit; stem was imagenet, is None",
        "--stem cifar": "stem was imagenet, is cifar",
        "--seed 7": "seed was 42, is 7",
        "--batch_size 6": "images per step was 8, is 6",
        "--sync_bn": "sync_bn was False, is True",
        "--lr 0.5 --no_scale_lr": "lr was 0.001 x ranks, is 0.5",
    }.items():
        assert message in (text := _refused(capsys, *argv, *option.split())) and str(where / "optimizer_1") in text
    other = _write_folder(tmp_path / "other", 27, 5)
    text = _refused(capsys, *argv, "--data", other)
    assert "training images was 26, is 27; checksum was " in text
    text = _refused(capsys, *argv, "--data", "builtin")
    assert "data was folder, is builtin; training images was 26, is 10000; " in text and "classes was 3, is 10" in text


def test_resume_of_a_damaged_checkpoint(finished, folder, tmp_path, capsys):
    argv = ("--data", folder, "-c", tmp_path, "-r", 1, "--epochs", 2, "--batch_size", 8)
    copy = tmp_path / "optimizer_1"
    copy.mkdir()
    for f in (finished[0] / "optimizer_1").iterdir():
        (copy / f.name).write_bytes(f.read_bytes())
    (copy / "extra.pt").write_bytes((copy / "extra.pt").read_bytes()[:50])
    assert f"{copy / 'extra.pt'}: cannot be read: " in _refused(capsys, *argv, status=1)
    (copy / "extra.pt").write_bytes((finished[0] / "optimizer_1" / "extra.pt").read_bytes())
    os.truncate(copy / "rank_00000.safetensors", 5000)
    assert f"{copy / 'rank_00000.safetensors'} has 5000 bytes instead of" in _refused(capsys, *argv, status=1)


def test_resume_finds_a_save_that_was_killed_between_its_renames(finished, folder, tmp_path, capsys):
    where, expected = finished
    (tmp_path / "optimizer_2.old").symlink_to(where / "optimizer_2")
    result, _ = _main(capsys, "--data", folder, "-c", tmp_path, "-r", 2, "--epochs", 2, "--batch_size", 8, "-i", 0)
    assert result["accuracy"] == expected["accuracy"] and result["loss"] == expected["loss"]


def test_interval_0_writes_nothing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", str(folder))  # --data is auto
    result, text = _main(capsys, "-i", 0, "--epochs", 1, "--batch_size", 8, "--stem", "cifar", "--micro_batches", 3)
    assert not list(tmp_path.iterdir())
    assert result["stem"] == "cifar" and result["data"] == "folder" and text.count("accuracy") == 2


def test_learning_rates_and_the_epochs_that_are_saved(folder, tmp_path, capsys, monkeypatch):
    """A third of it after each milestone, counted in epochs; resumed on one rank as on the one it began with."""
    import ddp
    seen = []

    class Recorded(ddp.DDP):
        def step(self):
            seen.append(self.optimizer.param_groups[0]["lr"])
            super().step()

    monkeypatch.setattr(ddp, "DDP", Recorded)
    monkeypatch.setattr(cifar, "MILESTONES", (1, 3))
    argv = ("--data", folder, "-c", tmp_path, "-i", 2, "--model", "vit", "--batch_size", 12)  # epochs of 2 steps
    _main(capsys, *argv, "--epochs", 3)
    assert seen == pytest.approx([1e-3] * 2 + [1e-3 / 3] * 4)
    assert sorted(f.name for f in tmp_path.glob("optimizer_*")) == ["optimizer_2", "optimizer_3"]
    seen.clear()
    monkeypatch.setattr(cifar, "LR", 7.0)  # the saved one goes on
    _, text = _main(capsys, *argv, "--epochs", 4, "-r", 2)
    assert seen == pytest.approx([1e-3 / 3] * 2 + [1e-3 / 9] * 2) and "epochs 3 to 4" in text
    assert sorted(f.name for f in tmp_path.glob("optimizer_*")) == ["optimizer_2", "optimizer_3", "optimizer_4"]
    assert cifar.GAMMA == 1 / 3


def test_files_are_old_or_new_and_never_half(tmp_path, monkeypatch):  # CASES 43
    file = tmp_path / "model_1.pth"
    cifar.write_file(file, {"a": torch.ones(3)})

    def fails(content, f):
        f.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="disk full"):
        cifar.write_file(file, {"a": torch.zeros(3)})
    assert torch.load(file, weights_only=True)["a"].tolist() == [1, 1, 1]


# ---- runs on several ranks -------------------------------------------------------------------------------------------


def _run(*argv, losses=None):
    """What the run prints on this rank, and what it stops with."""
    args = cifar.parse([*map(str, argv)])
    _, engine_class, knobs = glue.load_engine(args)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), \
                mock.patch.object(cifar, "build_engine", recorded(losses) if losses else cifar.build_engine):
            cifar.run(args, engine_class, knobs, torch.device("cpu"))
    except cifar.Stop as stop:
        return out.getvalue(), (str(stop), stop.status)
    return out.getvalue(), None


def recorded(losses, kill_at=0):
    """build_engine for engines that write each step's loss to the file LOSSES.RANK; rank 1 is killed in step `kill_at`."""
    steps, build_engine = [], cifar.build_engine

    def build(*args, **kwargs):
        engine = build_engine(*args, **kwargs)
        forward_backward = engine.forward_backward

        def record(*args, **kwargs):
            loss = forward_backward(*args, **kwargs)
            steps.append(loss.item().hex())
            Path(f"{losses}.{engine.rank}").write_text(" ".join(steps))
            if engine.rank == 1 and len(steps) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss

        engine.forward_backward = record
        return engine

    return build


def test_odd_numbers_of_images_and_one_decision(pool, tmp_path, finished, folder):
    """CASES 34 and 37. 17 images are 2 steps of 8 on 2 ranks; 3 test images are fewer than 4 ranks; all ranks miss the target by
    the same number. Fewer images than a step takes, or than there are ranks, stop all of them."""
    _write_folder(tmp_path, 17, 3)
    for ranks in (2, 4):
        argv = ("--data", tmp_path, "-i", 0, "--epochs", 1, "--batch_size", 8 // ranks, "--lr", 0, "--target_acc", 1.0)
        outputs, stops = zip(*pool.run(ranks, _run, *argv))
        assert "2 steps of 8 images" in outputs[0] and not any(outputs[1:])
        accuracy = _result(outputs[0])["accuracy"]
        assert accuracy < 1 and set(stops) == {(f"accuracy {accuracy} is below the target 1.0", 1)}
    _write_folder(tmp_path / "small", 3, 3)
    message = "--batch_size 1 on 4 data-parallel ranks takes 4 images a step, more than the 3 training images"
    found = pool.run(4, _run, "--data", tmp_path / "small", "-i", 0, "--batch_size", 1, "--sync_bn")
    assert [stop for _, stop in found] == [(message, 2)] * 4


def test_resume_and_eval_on_other_ranks(pool, finished, folder):
    """One rank of 8 images goes on as two ranks of 4, in half precision; evaluation of a file has the same numbers on 3 ranks."""
    where, expected = finished
    argv = ("--data", folder, "-c", where)
    outputs, stops = zip(*pool.run(2, _run, *argv, "-r", 1, "--epochs", 2, "-i", 0, "--batch_size", 4, "--precision", "bf16"))
    assert stops == (None, None) and "epochs 2 to 2, 3 steps of 8 images each, lr 0.001" in outputs[0]
    outputs, stops = zip(*pool.run(3, _run, *argv, "--eval", "-e", 2))
    assert stops == (None,) * 3
    assert [_result(outputs[0])[key] for key in ("accuracy", "loss")] == [expected[key] for key in ("accuracy", "loss")]


@pytest.mark.parametrize("options", [
    "--model vit --micro_batches 2 -p hybrid --precision fp32 --tp 2", "--sync_bn --precision bf16",
    *(pytest.param(f"--model vit -p hybrid --precision fp32 {knobs}", marks=pytest.mark.sweep) for knobs in (
        "--tp 2 --sp_mode split_gather", "--sp 2 --sp_mode ring", "--sp 2 --sp_mode all_to_all", "--pp 2 --micro_batches 2"))])
def test_eval_equals_the_run_on_two_ranks(pool, folder, tmp_path, options):
    argv = ("--data", folder, "-c", tmp_path, *options.split())
    (text, stop), _ = pool.run(2, _run, *argv, "--epochs", 1, "--batch_size", 4)
    again, _ = pool.run(2, _run, *argv, "--eval", "-e", 1)
    assert stop is again[1] is None
    same = _result(again[0])  # one process, which adds up in another order than ranks that share matrices
    same["loss"] = pytest.approx(same["loss"], rel=1e-5 if "hybrid" in options else 0, abs=0)
    for key in ("accuracy", "loss", "model", "stem", "precision", "data", "epochs"):
        assert _result(text)[key] == same[key]


DRIVER = """
import sys
import test_cifar, train_cifar
losses, kill_at, *argv = sys.argv[1:]
train_cifar.build_engine = test_cifar.recorded(losses, int(kill_at))
train_cifar.main(argv)
"""


def _torchrun(script, *argv, limit_s=100):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    return subprocess.run([*command, *map(str, argv)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)


@pytest.mark.parametrize("options", ["", *(pytest.param(options, marks=pytest.mark.sweep) for options in (
    "--model vit -p ddp_fp16 --engine growth_interval=3", "--stem cifar --sync_bn --micro_batches 2", "-p zero2", "-p fsdp"))])
def test_killed_and_resumed_equals_straight(pool, folder, tmp_path, options):
    """CASES 42: 4 epochs of 3 steps on two ranks; or, under torchrun, rank 1 is killed in the last step but one, and another run
    goes on after the second epoch. Every loss, the weights, the moments and running statistics: bit for bit."""
    (tmp_path / "driver.py").write_text(DRIVER)
    argv = ("--data", folder, "--epochs", 4, "-i", 2, "--batch_size", 4, *options.split())
    (text, stop), _ = pool.run(2, _run, *argv, "-c", tmp_path / "a", losses=tmp_path / "straight", limit_s=100)
    assert stop is None
    killed = _torchrun(tmp_path / "driver.py", tmp_path / "killed", 11, *argv, "-c", tmp_path / "b")
    assert killed.returncode != 0 and "Signal 9 (SIGKILL)" in killed.stderr
    assert sorted(f.name for f in (tmp_path / "b").iterdir()) == ["lr_scheduler_2.pth", "model_2.pth", "optimizer_2"]
    (resumed, stop), _ = pool.run(2, _run, *argv, "-c", tmp_path / "b", "-r", 2, losses=tmp_path / "resumed", limit_s=100)
    assert stop is None
    straight = (tmp_path / "straight.0").read_text().split()
    assert len(set(straight)) == 12 and (tmp_path / "straight.1").read_text().split() == straight
    assert (tmp_path / "killed.1").read_text().split() == straight[:11]
    assert (tmp_path / "resumed.0").read_text().split() == straight[6:]
    a, b = (torch.load(tmp_path / run / "model_4.pth", weights_only=True) for run in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    sums = [[hashlib.sha256((tmp_path / run / "optimizer_4" / f"rank_0000{rank}.safetensors").read_bytes()).digest()
             for rank in (0, 1)] for run in "ab"]
    assert sums[0] == sums[1]
    results = [{k: v for k, v in _result(out).items() if k != "samples_per_second"} for out in (text, resumed)]
    assert results[0] == results[1]


# ---- the built-in images -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builtin():
    return cifar.builtin_data()


def test_builtin_images(builtin):
    """As many of each class, no image twice, and the same whatever the global random state is."""
    assert {split: len(labels) for split, (_, labels) in builtin.items()} == {"train": 10000, "test": 1000}
    for images, labels in builtin.values():
        assert images.shape[1:] == (3, 32, 32) and images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert labels.bincount().tolist() == [len(labels) // 10] * 10
    rows = [bytes(image) for images, _ in builtin.values() for image in images.numpy()]
    assert len(set(rows)) == 11000
    np.random.seed(5)
    torch.manual_seed(5)
    again = cifar.builtin_images(1000, seed=2)
    assert torch.equal(again[0], builtin["test"][0]) and torch.equal(again[1], builtin["test"][1])


def test_builtin_colours(builtin):
    """The class with the nearest mean colour is right for fewer than 20 % of the images; chance is 10 %."""
    means = {split: images.float().mean((2, 3)) for split, (images, _) in builtin.items()}
    centres = torch.stack([means["train"][builtin["train"][1] == k].mean(0) for k in range(10)])
    nearest = torch.cdist(means["test"], centres).argmin(1)
    assert (nearest == builtin["test"][1]).float().mean() < 0.2


def test_mirrored_shapes_are_of_the_same_class():
    """Each shape is the mirror of a shape of its class: itself, or, of the upright bars and the checks, one moved a bit."""
    grid = (np.arange(64) + 0.5) / 32 - 1
    u, v = np.broadcast_arrays(grid, grid[:, None])
    for name, shape in cifar.SHAPES.items():
        whole = shape(u, v)
        if name == "upright bars":
            np.testing.assert_array_equal(np.unique(whole, axis=0), whole[:1])
        elif name == "checks":
            np.testing.assert_array_equal(whole[:, ::-1], whole.T[::-1])  # checks again
        else:
            np.testing.assert_array_equal(whole[:, ::-1], whole)
    assert len({shape(u, v).tobytes() for shape in cifar.SHAPES.values()}) == 10


@pytest.mark.sweep
def test_two_ranks_learn_the_builtin_images():
    """Seen: 0.98 after two epochs, 45 s."""
    done = _torchrun(ROOT / "train_cifar.py", "--data", "builtin", "--epochs", 2, "-i", 0, "--target_acc", 0.6, limit_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = _result(done.stdout)
    print(result)
    assert result["data"] == "builtin" and result["world_size"] == 2 and result["accuracy"] >= 0.6
    assert "arning" not in done.stdout + done.stderr
