"""One model on several devices: frames split by rows or columns, the same bits as on one."""
