"""The router: Op and Route (op.py), the order of authority (choose.py), devices, tables, tuning. Knows no op."""
