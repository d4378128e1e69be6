"""``device_bytes``: whatever stays on the device, weights are those without it, to the bit."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import ForkingOffload, assert_equal_weights
from support.offload_nets import Split, leave_group

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders that exist
]
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
FEW = (0.1, 0.5, 1.0)  # on the host and as a copy, as a copy and on the device, on the device
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.05},
    "two ranks": {"devices": 2, "gradient_clip_val": 0.05},
}


class Noting(Split):
    """Notes where groups are after its last batch."""

    def on_train_end(self):
        groups = self.trainer.strategy._sharding.groups
        self.places = [
            "device" if group.landing is None else "copy" if group.flat_shards[0].resident is not None else "host"
            for group in groups
        ]


@pytest.fixture
def train(fit):
    def train(device_bytes=None, *callbacks, make=Noting, offload=None, **options):
        given = {"max_epochs": 2, "devices": 1, "use_distributed_sampler": False, **options}
        model = fit(make, *callbacks, strategy=ForkingOffload(device_bytes=device_bytes, **(offload or {})), **given)
        leave_group()
        return model

    return train


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_share_of_the_device_gives_the_same_bits(variant, train):
    options = VARIANTS[variant]
    expected = train(None, **options)
    found = []
    for share in SHARES if variant == "plain" else FEW:
        ours = train(share, **options)
        assert_equal_weights(ours, expected)
        found.append(getattr(ours, "places", None))
    if variant == "plain":  # with several ranks the module of this process is not the one that was trained
        assert set(found[0]) == {"host"}
        assert {"host"} < set(found[1])  # what is left after the copies that fit may hold a small group
        assert set(found[2]) == {"copy"}
        assert set(found[3]) == {"copy", "device"}
        assert set(found[4]) == {"device"}


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(None, 0.5), (0.5, None), (1.0, 0.1)])
def test_a_checkpoint_goes_on_with_another_share(saved_by, loaded_by, train, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    train(saved_by, saver, max_steps=4, enable_checkpointing=True)
    assert_equal_weights(train(loaded_by, ckpt_path=tmp_path / "step=3.ckpt"), train(None))


def test_states_on_a_disk_are_those_of_what_is_on_the_host(train, tmp_path):
    ours = train(0.5, offload={"nvme_path": tmp_path})
    assert set(ours.places) == {"copy", "device"}
    assert_equal_weights(ours, train(None))


def test_sizes_are_bytes(train):
    num_bytes = 16 * sum(parameter.numel() for parameter in Noting().parameters())
    assert set(train(num_bytes).places) == {"device"}
    assert set(train(num_bytes - 1).places) == {"copy", "device"}
    assert "host" in train(f"{num_bytes // 16} B").places


def test_what_a_host_has_left_is_not_measured(train):
    message = (
        r"^ForkingOffload\(device_bytes='auto'\) measures free device memory, and cpu has no allocator statistics\. "
        r"Give bytes, such as device_bytes='8GiB', or a share of the model state, such as 0\.5\.$"
    )
    with pytest.raises(MisconfigurationException, match=message):
        train("auto")
