"""What the safetensors files of a checkpoint folder say of themselves: names, shapes and types.  No weight is read."""

from __future__ import annotations

from pathlib import Path

from rose.errors import WeightsError
from rose.weights.spec import DTYPE_BYTES, TensorSpec


def checkpoint_files(folder: Path | str) -> list[Path]:
    """The safetensors files of a checkpoint folder, by name; empty: it has none."""
    paths = sorted(Path(folder).glob("*.safetensors"))
    # Mistral checkpoints ship the same tensors once more under other names.
    return [path for path in paths if not path.name.startswith("consolidated")]


def checkpoint_tensors(folder: Path | str) -> list[TensorSpec]:
    """Names, shapes and types in the safetensors files of a checkpoint folder; reads headers only, which the library bounds.

    Raises:
        WeightsError: No such files, an unreadable header, a name twice, or a type we do not know.
    """
    from safetensors import SafetensorError, safe_open

    paths = checkpoint_files(folder)
    if not paths:
        raise WeightsError(f"{folder} holds no .safetensors file", field="model")
    found: dict[str, TensorSpec] = {}
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    part = file.get_slice(name)
                    if name in found:
                        raise WeightsError(f"{path.name}: occurs in two files", field=name)
                    if part.get_dtype() not in DTYPE_BYTES:
                        raise WeightsError(f"{path.name}: element type {part.get_dtype()}", field=name)
                    found[name] = TensorSpec(name, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read: {error}", field="model") from error
    return list(found.values())
