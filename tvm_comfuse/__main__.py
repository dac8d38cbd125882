"""``python -m tvm_comfuse``."""

from tvm_comfuse.cli.main import main

if __name__ == "__main__":
    main()
