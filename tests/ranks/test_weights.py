"""A rank reads what it owns, as stored, and rounds linears once to the compute dtype."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from leafsum.collectives.placement import Placement
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.collectives.tree import CanonicalTree
from leafsum.errors import ConfigError, ModelError
from leafsum.ranks import ops
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.context import RankContext
from leafsum.ranks.footprint import parameter_counts, rank_parameters
from leafsum.ranks.models import FAMILIES
from leafsum.ranks.models.decoder import Decoder
from leafsum.ranks.sizes import expected_tensors
from leafsum.ranks.weights import WeightReader
from model_runs import assert_same_run, build, run_single, whole
from tiny_checkpoints import Tensors, config_with, random_tensors, write_checkpoint

OPTIONS = [{}, {"attention_bias": True, "mlp_only_layers": [0]}, {"tie_word_embeddings": True}]


def read_by_rank(folder: Path, num_ranks: int, placement: str = "contiguous") -> list[WeightReader]:
    """The readers after each rank has built its model."""

    def rank_read(transport: Transport) -> WeightReader:
        context = RankContext(transport.rank, num_ranks, "bfloat16", "auto", placement, transport)
        spec = load_spec(folder)
        with WeightReader(Checkpoint.open(folder), context.dtype) as reader:
            Decoder(FAMILIES[spec.family], spec, reader, context)
        return reader

    return run_ranks(num_ranks, rank_read)


@pytest.mark.parametrize("placement", ["contiguous", "strided", "random:3"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_rank_reads_only_its_own_experts(tmp_path: Path, num_ranks: int, placement: str) -> None:
    readers = read_by_rank(write_checkpoint(tmp_path, num_shards=2), num_ranks, placement)
    owners = Placement.named(placement, CanonicalTree(20), num_ranks)
    for rank, reader in enumerate(readers):
        read = {name for name in reader.names_read if ".experts." in name}
        parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
        ids = owners.ids_of(rank)
        assert read == {f"model.layers.{n}.mlp.experts.{id_}.{part}" for n in range(2) for id_ in ids for part in parts}
        assert len(reader.names_read) == len(set(reader.names_read))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("changes", OPTIONS)
@pytest.mark.parametrize("num_ranks", [1, 3, 8, 11])
def test_the_bytes_read_are_the_bytes_owned(tmp_path: Path, fused: bool, changes: dict, num_ranks: int) -> None:
    """Everything is stored in two bytes here; at 11 ranks some have no heads."""
    folder = write_checkpoint(tmp_path, fused=fused, **changes)
    spec = load_spec(folder)
    owners = Placement.contiguous(CanonicalTree(20), num_ranks)
    for rank, reader in enumerate(read_by_rank(folder, num_ranks)):
        num_kept = sum(rank_parameters(spec, rank, num_ranks, owners.ids_of(rank)).values())
        assert reader.bytes_read == 2 * num_kept


def test_counted_parameters_are_the_stored_ones(tmp_path: Path) -> None:
    for case, changes in enumerate(OPTIONS):
        folder = write_checkpoint(tmp_path / str(case), **changes)
        spec, checkpoint = load_spec(folder), Checkpoint.open(folder)
        shapes = expected_tensors(spec, checkpoint.entries)
        stored = sum(int(np.prod(shape)) for shape in shapes.values())
        assert sum(parameter_counts(spec).values()) == stored


@pytest.mark.parametrize("stored_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_linears_are_rounded_once(tmp_path: Path, stored_dtype: str, dtype: str) -> None:
    """torch's conversions of single elements are IEEE roundings, subnormals included; a NaN-free case compares bits."""

    def extremes(tensors: Tensors) -> None:
        tensors["lm_head.weight"][0, :6] = torch.tensor([-0.0, 1e-40, 6e-8, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11])

    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, dtype=stored_dtype, edit=extremes))
    with WeightReader(checkpoint, dtype) as reader:
        stored = reader.read("lm_head.weight")
        rounded = reader.linear("lm_head.weight", rows=(0, 7))
        exact = reader.fp32("model.norm.weight")
    assert rounded.dtype == ops.TORCH_DTYPES[dtype]
    expected = stored[:7].to(torch.float32).to(ops.TORCH_DTYPES[dtype])
    assert_same_bits(ops.storage(rounded), ops.storage(expected))
    assert exact.dtype == torch.float32
    norm = random_tensors(config_with(), 0)["model.norm.weight"].to(ops.TORCH_DTYPES[stored_dtype])
    assert_same_bits(exact.numpy(), norm.to(torch.float32).numpy())


def test_rows_and_columns_are_cut_before_they_are_read(tmp_path: Path) -> None:
    with WeightReader(Checkpoint.open(write_checkpoint(tmp_path, dtype="float32")), "float32") as reader:
        name = "model.layers.0.self_attn.o_proj.weight"
        part = reader.read(name, columns=(32, 64))
        assert reader.bytes_read == 48 * 32 * 4
        assert torch.equal(part, reader.read(name)[:, 32:64])
        assert torch.equal(reader.read(name, rows=(3, 5)), reader.read(name)[3:5])
        assert part.is_contiguous()


def test_a_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    def too_large(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.gate.weight"][2, 3] = 65520.0

    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, dtype="float32", edit=too_large))
    with WeightReader(checkpoint, "float16") as reader:
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.gate\.weight holds values beyond float16's range"):
            reader.linear("model.layers.1.mlp.gate.weight")
        reader.linear("model.layers.0.mlp.gate.weight")


def test_a_file_whose_tensors_are_not_aligned(tmp_path: Path) -> None:
    """A header's length may be odd: what lies behind it is at odd addresses, where the file is mapped."""
    aligned, shifted = (write_checkpoint(tmp_path / name, dtype="float32") for name in ("aligned", "shifted"))
    file = shifted / "model.safetensors"
    content = file.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    file.write_bytes((len(header) + 1).to_bytes(8, "little") + header + b" " + content[8 + len(header) :])
    expected, found = (run_single(folder, [[1, 2, 3]], whole([[1, 2, 3]]), "bfloat16") for folder in (aligned, shifted))
    assert_same_run(found, expected)


def test_a_model_of_too_many_ranks_or_a_wrong_checkpoint_is_not_built(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match="--tp from 1 to 2"):
        run_ranks(3, lambda transport: build(folder, transport, "bfloat16"))
    write_checkpoint(tmp_path, edit=lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"1 missing \(model\.norm\.weight"):
        run_ranks(2, lambda transport: build(folder, transport, "bfloat16"))


def test_a_tensor_that_kernels_cannot_view_is_refused() -> None:
    for tensor, found in ((torch.ones(4, 4).T[1:], "other strides"), (torch.ones(4, 4).double(), "float64")):
        with pytest.raises(ValueError, match=f"logits: expected .*, found {found}"):
            ops.argmax(tensor)
    with pytest.raises(ValueError, match="expected a tensor of float32, bfloat16, float16"):
        ops.storage(torch.ones(2, dtype=torch.int8))
    ours = torch.zeros(3, dtype=torch.bfloat16)
    ops.storage(ours)[1] = 0x3F80
    assert ours.tolist() == [0.0, 1.0, 0.0]
