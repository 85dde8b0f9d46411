"""The rule for tables as one would write it densely, in fp64: all rows at every step, with gradients of zero for those
that are not of the step. No code and no shortcut of hf_engram.optim is used."""

import torch


class DenseRule:
    """Tables `[rows, d]` by steps on dense gradients."""

    def __init__(self, table: torch.Tensor, beta=0.99, momentum=0.0, eps=1e-15, weight_decay=0.0) -> None:
        self.table = table.detach().double().clone()
        self.beta, self.beta_1, self.eps, self.weight_decay = beta, momentum, eps, weight_decay
        self.second = torch.zeros(len(table), dtype=torch.float64)
        self.first = torch.zeros_like(self.table)
        self.weight = torch.zeros_like(self.second)
        # What a dense step would do at once and ours does when the row is next used.
        self.due = torch.ones_like(self.second)

    def step(self, grad: torch.Tensor, lr: float) -> None:
        """`lr`: the table's, multiplied already."""
        grad = grad.double()
        used = (grad != 0).any(1)
        self.second = self.beta * self.second + (1 - self.beta) * grad.square().mean(1)
        self.first = self.beta_1 * self.first + grad
        self.weight = self.beta_1 * self.weight + used
        self.due *= 1 - lr * self.weight_decay
        for row in used.nonzero().flatten().tolist():
            direction = self.first[row] / self.weight[row]
            self.table[row] *= self.due[row]
            self.table[row] -= lr * direction / (self.second[row].sqrt() + self.eps * (1 - self.beta) ** 0.5)
            self.due[row] = 1.0
