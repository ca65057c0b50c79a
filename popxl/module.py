"""`Module`: a graph-building function that stores the inputs it made. For layers see the package `popxl_addons`."""

from typing import Any


class Module:
    """A graph-building callable with attributes for what it creates. Subclasses implement `build`.

    A graph input that `build` makes and keeps as an attribute serves as a key when the graph is called. There is no
    need to call `super().__init__()`.

    Example:
        class Affine(popxl.Module):
            def build(self, x, width):
                self.k = popxl.graph_input((x.shape[-1], width), x.dtype, "k")
                return x @ self.k

        affine = Affine()
        graph = ir.create_graph(affine, x, 8)
        (y,) = ops.call(graph, x, inputs_dict={affine.k: k})
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `self.build(*args, **kwargs)`."""
        return self.build(*args, **kwargs)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Create the ops in the current graph and return its outputs.

        Raises:
            NotImplementedError: for a subclass without `build`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no `build` method. A popxl.Module says there what it computes: "
            "add `def build(self, ...)` that creates ops and returns its output tensors."
        )
