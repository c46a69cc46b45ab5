import pytest
import torch
from torch import nn

from ddp_core.catalog import BUILTIN_MODELS, SUGGESTED_MODELS, is_model_name
from ddp_core.errors import UserError
from ddp_core.training.models import build_model, count_parameters
from ddp_core.training.optimization import OPTIMIZERS


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 3, 5), (3, 64, 48)])
@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_built_in_models_take_any_image(name, shape):
    model = build_model(name, shape, 7)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    assert count_parameters(model) > 0


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet18", (1, 8, 8)),
        ("mobilenet_v3_small", (1, 28, 28)),
        ("efficientnet_b0", (4, 32, 32)),
        ("convnext_tiny", (1, 32, 32)),
        ("densenet121", (3, 32, 32)),
        ("vit_b_16", (1, 32, 32)),
        ("vgg11_bn", (1, 32, 32)),
        ("alexnet", (3, 64, 64)),
        ("squeezenet1_1", (1, 28, 28)),
        ("swin_t", (1, 28, 28)),
        ("shufflenet_v2_x0_5", (1, 8, 8)),
        ("mnasnet0_5", (5, 28, 28)),
        ("regnet_y_400mf", (1, 28, 28)),
        ("googlenet", (1, 28, 28)),
        ("inception_v3", (3, 96, 96)),
    ],
)
def test_torchvision_families_are_fitted_to_channels_and_classes(name, shape):
    model = build_model(name, shape, 7)
    model.train()
    with torch.no_grad():
        logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()


def test_the_fitted_first_layer_keeps_the_architectures_initialisation():
    torch.manual_seed(0)
    grey = build_model("resnet18", (1, 32, 32), 10)
    torch.manual_seed(0)
    colour = build_model("resnet18", (3, 32, 32), 10)
    assert torch.equal(grey.conv1.weight, colour.conv1.weight[:, :1])
    assert torch.equal(grey.layer1[0].conv1.weight, colour.layer1[0].conv1.weight)


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("vgg11", (1, 8, 8), 32),
        ("alexnet", (3, 32, 32), 64),
        ("vit_b_16", (1, 28, 28), 16),
        ("maxvit_t", (3, 32, 32), 224),
    ],
)
def test_images_too_small_for_a_model_are_refused_with_a_size_that_works(name, shape, size):
    with pytest.raises(UserError, match=f"set image_size to {size}") as caught:
        build_model(name, shape, 10)
    assert caught.value.field == "training.image_size"
    assert f"{shape[1]} × {shape[2]}" in str(caught.value)


def test_a_last_batch_of_one_sample_is_refused_only_where_batchnorm_cannot_take_it():
    with pytest.raises(UserError, match="choose another batch_size") as caught:
        build_model("resnet18", (3, 32, 32), 10, smallest_batch=1)
    assert caught.value.field == "training.batch_size"
    build_model("cnn", (3, 32, 32), 10, smallest_batch=1)
    build_model("mobilenet_v3_small", (3, 64, 64), 10, smallest_batch=2)


def test_an_unknown_model_names_its_neighbours():
    with pytest.raises(UserError, match="resnet18") as caught:
        build_model("resnet19", (3, 32, 32), 10)
    assert caught.value.field == "training.model"


def test_checking_a_model_leaves_no_trace_in_its_statistics():
    model = build_model("resnet18", (3, 32, 32), 10)
    norm = model.bn1
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_mean, torch.zeros(64))
    torch.manual_seed(0)
    build_model("cnn", (1, 8, 8), 10)
    after_cnn = torch.rand(1)
    torch.manual_seed(0)
    build_model("cnn", (1, 8, 8), 10, smallest_batch=7)
    assert torch.rand(1) == after_cnn


def test_the_catalog_knows_what_torchvision_knows():
    from torchvision import models

    assert set(SUGGESTED_MODELS) <= set(models.list_models(module=models)) | set(BUILTIN_MODELS)
    assert all(is_model_name(name) for name in models.list_models(module=models))


def test_optimizers_are_what_the_config_says():
    from typing import get_args

    from ddp_core.config import TrainingConfig

    model = nn.Linear(2, 2)
    assert set(get_args(TrainingConfig.model_fields["optimizer"].annotation)) == set(OPTIMIZERS)
    sgd = OPTIMIZERS["sgd"](model.parameters(), lr=0.1, weight_decay=0.01)
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"], sgd.defaults["weight_decay"]) == (0.9, True, 0.01)
    assert isinstance(OPTIMIZERS["adamw"](model.parameters(), lr=0.1, weight_decay=0.01), torch.optim.AdamW)
