"""The router: Op and Route (op.py), the order of authority (choose.py), devices, tables.

Knows no op, measures nothing.
"""
