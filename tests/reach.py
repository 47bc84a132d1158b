"""What a change of one input may reach: the oracle of the poison and perturbation tests.

Rows of the plane are independent of each other: a change reaches the rows that read it, and from these, backward,
the keys that they see. Who sees whom comes from the scalar loops, not from the package.
"""

import loops
import numpy as np


def visible_plane(inputs):
    """(B…, Hq, L, S): may query i see key j."""
    return loops.forward(*inputs[:3], **inputs.options).logits != -np.inf


def reading_rows(case, visible, name, chosen):
    """(B…, Hq, L): the rows that read the chosen entries of an input, an upstream gradient, or a direction.

    `chosen` is a bool array like the array of that name; for those of vectors (query, key, value, grad_output)
    without the last axis.
    """
    name = name.removeprefix("direction of ")
    sees_any = visible.any(axis=-1)
    if name in ("query", "grad_output"):
        return np.broadcast_to(chosen, case.lse_shape) & sees_any
    if name in ("key", "value"):
        if case.has_gqa:
            chosen = np.repeat(chosen, group_size(case), axis=-2)
        return (np.broadcast_to(chosen, (*case.lse_shape[:-1], case.key[-2]))[..., None, :] & visible).any(axis=-1)
    if name in ("bias", "grad_weights"):
        return (np.broadcast_to(chosen, case.weights_shape) & visible).any(axis=-1)
    if name == "alibi_slopes":
        return np.broadcast_to(chosen[..., None], case.lse_shape) & sees_any
    if name == "sinks":
        return np.broadcast_to(chosen[..., None], case.lse_shape)
    if name == "grad_lse":
        return chosen
    raise ValueError(name)


def reached(case, inputs, visible, name, rows):
    """For every name of `results.everything`: True where a change in `name`, read by these rows, may show.

    Only a sink is read by rows that see no key, and shows in their lse alone.
    """
    nothing = np.zeros_like(rows)
    is_upstream, is_direction = name.startswith("grad_"), name.startswith("direction of ")
    name = name.removeprefix("direction of ")
    moves_weights = not is_upstream and name != "value"

    forward = rows if moves_weights and not is_direction else nothing
    output = forward | rows if name == "value" and not is_direction else forward
    reach = _forward_reach("", visible, output, forward)
    reach |= {"row_shift": forward, "row_sum": forward, "logits": reach["weights"]}

    tangents = nothing if is_upstream else rows
    lse_tangent = nothing if name == "value" else tangents
    reach |= _forward_reach("tangent_", visible, tangents, lse_tangent)
    for result in ("output", "lse", "weights"):
        reach[f"second_grad_{result}"] = reach[f"tangent_{result}"]

    gradients = _gradient_reach(case, inputs, visible, rows)
    if name in ("value", "grad_lse", "grad_weights"):  # gV = Wᵀ gO reads none of them
        gradients["value"] = np.zeros_like(gradients["value"])
    for option, where in gradients.items():
        reach[f"grad_{option}"] = where & (not is_direction)
        reach[f"second_{option}"] = where
    return reach


def _forward_reach(prefix, visible, output_rows, lse_rows):
    # what is hidden is 0, or −∞, whatever happens to the row
    return {
        f"{prefix}output": (output_rows & visible.any(axis=-1))[..., None],
        f"{prefix}lse": lse_rows,
        f"{prefix}weights": lse_rows[..., None] & visible,
    }


def _gradient_reach(case, inputs, visible, rows):
    shapes = {option: array.shape for option, array in inputs.options.items() if isinstance(array, np.ndarray)}
    keys = (rows[..., None] & visible).any(axis=-2)
    if case.has_gqa:
        keys = keys.reshape(*case.batch, case.key[-3], group_size(case), case.key[-2]).any(axis=-2)
    gradients = {
        "query": any_to_shape(rows & visible.any(axis=-1), case.query[:-1])[..., None],
        "key": any_to_shape(keys, case.key[:-1])[..., None],
        "value": any_to_shape(keys, case.value[:-1])[..., None],
        "scale": keys.any(),
        "softcap": keys.any(),
    }
    if "bias" in shapes:
        gradients["bias"] = any_to_shape(rows[..., None] & visible, shapes["bias"])
    for option in shapes.keys() & {"sinks", "alibi_slopes"}:
        gradients[option] = any_to_shape(rows.any(axis=-1), shapes[option])
    return gradients


def group_size(case):
    return case.query[-3] // case.key[-3]


def any_to_shape(plane, shape):
    """`plane` or-ed over the axes along which an array of `shape` is broadcast to it."""
    plane = plane.any(axis=tuple(range(plane.ndim - len(shape))))
    repeated = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return plane.any(axis=repeated, keepdims=True)
