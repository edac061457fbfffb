"""The byte alphabet of byte-level BPE: its vocabulary files write every byte as one printable character."""

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHER = [byte for byte in range(256) if byte not in _PRINTABLE]  # written as the characters from 256 on

BYTES = [*_PRINTABLE, *_OTHER]
"""The 256 bytes in the order of GPT-2's first 256 ids."""

BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHER)}
"""The byte that each character of a vocabulary file stands for."""
