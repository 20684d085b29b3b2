"""Checkpoints that nobody has thought of: damaged, forged and drawn ones, with fresh seeds (`make fuzz SECONDS=600`).

Every case comes from its kind and one number alone. Whatever it is, nothing but a `UcpError` may come of it, in time
and memory that a small file deserves, and where a load is not refused its bits are the saved ones.
"""
