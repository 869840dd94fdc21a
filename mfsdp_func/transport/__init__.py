"""Carriers: the one effect of this library, moving elements between ranks."""

from mfsdp_func.transport.carrier import Call, Carrier, Parcel, carrier_of

__all__ = ["Call", "Carrier", "Parcel", "carrier_of"]
