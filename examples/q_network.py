"""A Q-network in plain NumPy: a perceptron with two hidden layers, its gradient worked out by hand, and Adam."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CARTPOLE = (4, 128, 128, 2)  # position, velocity, angle and its velocity; two hidden layers; push left or right


class QNetwork:
    """The value of every action, [..., actions], given observations [..., features].

    `weights` is all it knows: matrix and bias of each layer. Assign another network's and it is that network.
    """

    def __init__(self, rng: np.random.Generator, sizes: Sequence[int] = CARTPOLE) -> None:
        """Draw weights with which the signal keeps its variance from layer to layer (He et al., 2015)."""
        self.weights: list[Array] = []
        for rows, columns in pairwise(sizes):
            matrix = rng.normal(0.0, np.sqrt(2.0 / rows), (rows, columns))
            self.weights += [matrix.astype(np.float32), np.zeros(columns, np.float32)]

    def __call__(self, observations: Array) -> Array:
        """Return the values."""
        return self._layers(observations)[-1]

    def gradient(self, observations: Array, actions: Array, targets: Array) -> list[Array]:
        """Return the gradient of the mean Huber loss, in the order of `weights`.

        Args:
            observations: [N, features].
            actions: [N], those that were taken.
            targets: [N], what they turned out to be worth.
        """
        *inputs, values = self._layers(observations)
        taken = np.arange(len(actions)), actions
        errors = np.zeros_like(values)
        errors[taken] = np.clip(values[taken] - targets, -1.0, 1.0) / len(actions)
        gradients = []
        for layer, matrix in zip(reversed(inputs), self.weights[-2::-2], strict=True):
            gradients += [errors.sum(axis=0), layer.T @ errors]
            errors = (errors @ matrix.T) * (layer > 0)
        return gradients[::-1]

    def _layers(self, observations: Array) -> list[Array]:
        """Return the observations, the hidden layers and the values."""
        *hidden, last = zip(self.weights[::2], self.weights[1::2], strict=True)
        layers = [observations]
        for matrix, bias in hidden:
            layers.append(np.maximum(layers[-1] @ matrix + bias, 0.0))
        matrix, bias = last
        return [*layers, layers[-1] @ matrix + bias]


class Adam:
    """Gradient descent that finds a step size for each weight (Kingma and Ba, 2015)."""

    def __init__(self, weights: Sequence[Array], learning_rate: float) -> None:
        """Begin without memory of gradients."""
        self._learning_rate = learning_rate
        self._num_steps = 0
        self._means = [np.zeros_like(weight) for weight in weights]
        self._squares = [np.zeros_like(weight) for weight in weights]

    def descend(self, weights: Sequence[Array], gradients: Sequence[Array]) -> None:
        """Move the weights one step, in place."""
        self._num_steps += 1
        bias = np.sqrt(1.0 - 0.999**self._num_steps) / (1.0 - 0.9**self._num_steps)
        for weight, gradient, mean, square in zip(weights, gradients, self._means, self._squares, strict=True):
            mean[:] += 0.1 * (gradient - mean)
            square[:] += 0.001 * (gradient**2 - square)
            weight[:] -= self._learning_rate * bias * mean / (np.sqrt(square) + 1e-7)
