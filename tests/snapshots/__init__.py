"""State that outlives what is killed: whole jobs. Which test stands for what; names without a file
are tests of this folder, those without `test_` scripts of core/scripts, and `test_table.py` sees to
it that each of them exists.

What may happen, and what is lost then (docs/snapshots.md has the answers):

| row | tests |
|---|---|
| a rank raises, is killed | test_ranks_die |
| killed in the middle of a copy | test_killed_at_random_moments, \
training/checkpointing/test_ranks.py::test_a_death_at_any_moment_leaves_the_step_before_whole, \
snapshots/shm/test_segment.py::test_a_kill_at_any_moment_leaves_the_step_before |
| several ranks together | test_ranks_die, test_killed_at_random_moments |
| a rank hangs | test_ranks_die |
| the agent is killed, its memory has a name | test_an_agent_dies_and_comes_back, \
agent/snapshots/test_segments.py::test_the_next_agent_of_the_node_adopts_what_a_killed_one_had |
| all are killed, the master too | test_all_processes_of_the_only_node_are_killed, \
agent/snapshots/test_taken_over.py::test_its_ranks_go_on_from_it_and_it_goes_when_they_have_more |
| another training under the same name | \
agent/snapshots/test_taken_over.py::test_another_training_of_the_same_name_does_not_go_on_from_it |
| a container is killed and started again | \
containers/test_first_process.py::test_it_is_killed_and_started_again |
| the agent is killed, its memory goes too | test_a_node_with_the_only_copy_is_lost |
| the fork server is killed | test_the_fork_server_dies |
| fork server, saver, agent or master in mid-persist | test_each_process_is_killed_in_mid_persist, \
agent/snapshots/test_snapshots.py::\
test_a_saver_that_dies_ends_its_attempt_and_another_one_is_started |
| ranks in mid-persist | test_ranks_are_killed_in_mid_persist |
| at any call that writes a checkpoint | \
snapshots/saver/test_parts.py::test_a_saver_killed_at_any_call_leaves_the_last_checkpoint_whole, \
test_killed_at_random_moments |
| between marker and retention | test_killed_between_the_marker_and_the_sweep |
| the master is killed | test_the_master_dies_and_then_a_rank, \
test_each_process_is_killed_in_mid_persist, \
core/snapshots/test_checkpoints.py::test_a_stream_that_breaks_does_not_end_an_attempt |
| no master answers for some snapshots | test_no_master_answers_for_three_snapshots |
| a node is lost: DDP, HSDP | test_a_node_is_lost_and_all_have_the_same_state, \
test_a_spare_takes_the_place_and_the_state, \
training/checkpointing/test_ranks.py::test_a_copy_of_a_shard_stands_for_it |
| a node is lost: FSDP with replicas | test_a_spare_takes_over_what_the_lost_node_had, \
test_the_rest_goes_on_alone |
| a node is lost: FSDP without | test_a_node_with_the_only_copy_is_lost |
| two nodes are lost together: FSDP with replicas | snapshots_replicas_neighbours_are_lost |
| a node is excluded that has the only copy | test_an_excluded_node_stays_until_its_part_is_saved, \
snapshots_convicted_node_stays_until_saved |
| one is left over by node_unit that has the only copy | snapshots_node_unit_leaves_a_holder_over |
| a death while a checkpoint is written in last call | snapshots_death_while_saving_in_last_call |
| everything is lost | test_killed_at_random_moments (its last kill) |
| another job, from storage | test_other_numbers_of_ranks_from_storage |
| nodes come, nodes go | test_more_ranks_from_memory, \
test_a_node_is_lost_and_all_have_the_same_state, test_one_node_leaves_and_the_other_goes_on, \
training/checkpointing/test_ranks.py::test_sharded_state_from_memory_at_another_number_of_ranks |
| the disk is full | test_a_full_disk, \
snapshots/storage/test_writing.py::test_a_full_disk_is_said_and_nothing_is_left_on_it |
| storage hangs | test_storage_hangs_while_a_rank_dies, \
snapshots/saver/test_saver.py::test_a_hanging_file_system_makes_it_neither_deaf_nor_immortal |
| a zombie of an old round | test_a_node_that_was_lost_comes_back_with_what_it_held, \
agent/snapshots/test_snapshots.py::test_ranks_of_an_older_life_are_not_heard_any_more |
| a byte has changed: slot, replica, file, manifest | test_a_flipped_bit_in_memory, \
test_a_flipped_bit_in_a_replica, test_changed_bytes_in_storage |
| a segment is overwritten or truncated | test_a_segment_that_another_process_spoils, \
agent/snapshots/test_segments.py::test_a_truncated_segment_does_not_end_the_agent |
| a state that is whole and bad | test_a_state_that_kills_comes_last, \
test_what_is_suspect_comes_last_in_storage_too, \
training/checkpointing/test_checkpointer.py::test_an_unhealthy_step_is_left_out |
| a rank's own state, on a node that lives | test_a_living_rank_is_given_back_what_it_has_alone |
| SIGTERM | test_one_node_leaves_and_the_other_goes_on, \
test_one_node_leaves_and_all_have_the_same_state, test_the_only_node_leaves, \
test_all_nodes_leave_together, test_every_process_is_signalled, test_no_step_is_saved_in_time, \
departing_no_spare_stands_by, departing_no_spare_comes_in_time |
| SIGTERM between two rounds | test_a_node_leaves_between_two_rounds, departing_between_rounds, \
departing_all_between_rounds, departing_all_between_rounds_with_the_same_state, \
departing_unsaved_then_the_rest_between_rounds, departing_between_rounds_the_disk_is_full, \
departing_between_rounds_with_what_is_not_copied_yet, departing_between_rounds_from_poison, \
departing_between_rounds_after_a_loss |
| a save fails in the script | \
training/checkpointing/test_checkpointer.py::test_a_failed_save_is_told_and_training_goes_on, \
agent/snapshots/test_snapshots.py::\
test_a_step_that_one_rank_could_not_save_is_told_without_it, \
agent/snapshots/test_snapshots.py::test_a_rank_that_is_not_heard_any_more_holds_nobody_up |
| the state of a replica is silently corrupted | test_a_majority_names_the_rank |
| the master is killed while a checkpoint is written | \
snapshots_master_dies_while_a_checkpoint_is_written |
| no room for snapshots | test_shared_memory_that_is_too_small, \
agent/snapshots/test_segments.py::test_a_folder_without_room_is_done_without, \
agent/snapshots/test_segments.py::test_a_tmpfs_that_is_full_is_told_and_nothing_is_left_in_it |
| saved at the breakpoint, and before the end | test_saved_at_the_breakpoint, \
test_saved_before_the_job_ends, test_what_is_wanted_in_storage_comes_there |

Defects of others, each of which must not be ours (checkpointing 4.2, 4.4):

| defect | tests |
|---|---|
| one buffer: killed in mid-copy, the step before is gone | test_killed_at_random_moments |
| a torn state is restored as the older step | test_killed_at_random_moments, \
training/checkpointing/test_ranks.py::test_a_death_at_any_moment_leaves_the_step_before_whole |
| a restart frees what is still being written | test_ranks_are_killed_in_mid_persist, \
agent/snapshots/test_snapshots.py::test_what_is_being_written_stays_pinned_over_a_new_life |
| the marker stands before all parts do | \
snapshots/saver/test_parts.py::test_no_marker_without_all_parts, \
snapshots/saver/test_saver.py::test_parts_are_counted_before_a_commit |
| a layout that is computed once | test_a_layout_that_changes, \
training/checkpointing/test_checkpointer.py::test_the_plan_is_kept_until_something_is_replaced |
| replicas that are never copied back, or rot | test_a_spare_takes_over_what_the_lost_node_had, \
test_a_flipped_bit_in_a_replica |
| told step and memory disagree | \
snapshots/saver/test_parts.py::test_what_the_slot_does_not_hold_is_not_written, \
snapshots/saver/test_parts.py::test_a_snapshot_that_is_taken_back_meanwhile_leaves_no_file |
| mixed tiers and collectives in a load | test_a_node_with_the_only_copy_is_lost, \
training/checkpointing/test_ranks.py::test_the_newer_of_memory_and_storage_is_taken |
| a user's class is imported outside of ranks | test_ranks_die (`Place` of train.py) |
| pickle between processes, no checksums, files of its own kind | \
test_shape.py::test_no_lock_no_pickle_no_fixed_tmp_path, \
snapshots/storage/test_folder.py::test_a_changed_byte_is_found, \
snapshots/dcp/test_metadata.py::test_every_kind_of_tensor_is_read_bit_by_bit |
| steps of nodes that left count for ever | \
core/snapshots/test_ledger.py::test_what_is_of_another_round_does_not_count |
| a failed save ends training | \
training/checkpointing/test_checkpointer.py::test_a_failed_save_is_told_and_training_goes_on, \
agent/snapshots/test_snapshots.py::\
test_a_step_that_one_rank_could_not_save_is_told_without_it, \
agent/snapshots/test_snapshots.py::test_a_rank_that_is_not_heard_any_more_holds_nobody_up |
| the state of a replica is silently corrupted | test_a_majority_names_the_rank |
| the master is killed while a checkpoint is written | \
snapshots_master_dies_while_a_checkpoint_is_written |
| a step is noted before it is committed, the newest folder is taken incomplete | \
snapshots/storage/test_folder.py::test_what_has_a_marker_counts |
"""
