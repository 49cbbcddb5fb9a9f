"""Plans from counts alone: no graph is loaded, and no process is started."""

import heta


def main() -> None:
    """Prints the plan for ogbn-mag's counts on two hosts."""
    schema = heta.Schema(
        num_nodes={"paper": 736_389, "author": 1_134_649, "field": 59_965, "institution": 8_740},
        num_edges={
            ("author", "writes", "paper"): 7_145_660,
            ("paper", "written_by", "author"): 7_145_660,
            ("paper", "cites", "paper"): 5_416_271,
            ("paper", "cited_by", "paper"): 5_416_271,
            ("field", "topic_of", "paper"): 7_505_078,
            ("paper", "has_topic", "field"): 7_505_078,
            ("institution", "employs", "author"): 1_043_998,
            ("author", "affiliated_with", "institution"): 1_043_998,
        },
        feat_dim={"paper": 128},
        target="paper",
    )
    print(heta.plan(schema, parts=2, batch_size=2048).explain())


if __name__ == "__main__":
    main()
