"""Design, run and calibrate RLHF systems."""
