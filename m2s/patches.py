"""Attributes that a command sets for its duration: on the network, and on torch's global flags."""

import contextlib
from typing import Any


class AttributePatches(contextlib.ExitStack):
    """Set attributes and restore them all on `close`, last first.

    Example:
        >>> with AttributePatches() as patches:
        ...     patches.set(torch.backends.cudnn, "allow_tf32", False)
    """

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `close`.

        Args:
            owner: The object or module that has the attribute.
            name: The name of the attribute.
            value: The new value.
        """
        # A method that an instance inherits is restored by removing the instance's attribute, not by binding it there.
        inherited = name not in getattr(owner, "__dict__", {}) and callable(getattr(type(owner), name, None))
        before = None if inherited else getattr(owner, name)
        setattr(owner, name, value)
        if inherited:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)
