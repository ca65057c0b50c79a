"""Cost, memory and traffic of compiled programs, derived from XLA's output.

Reading order. The compiled text: `hlo` parses it; `work` counts operations, bytes and collectives of its instructions;
`schedule` finds the buffers that are live at each. Time: `kernels`, of one kernel; `network`, of one collective, and
`wires`, over the links between a program's chips; `step`, of an executable; `ipu_timing`, of several IPUs. What
sessions return and print: `cost`, computed by `program_cost`, with its parts in `lines`, `graph_costs`, `precision`,
`axes` and `step_timeline`; `memory`; `communication`; `changes`, between two costs. Before compilation: `graph_time`.
"""
