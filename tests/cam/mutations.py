"""Which test notices when the twin breaks one of its honesty rules: the switch of twin.MUTATIONS -> the rule."""

from __future__ import annotations

from tests.cam.twin import rules

NOTICED_BY = {
    "no-poison": rules.the_capacity_tail_is_poisoned,
    "in-order": rules.groups_arrive_in_an_order_nobody_can_build_on,
    "cancellable-receive": rules.a_dispatch_receive_cannot_be_cancelled,
    "overwrite-window": rules.a_window_in_flight_is_not_overwritten,
    "any-batch-info": rules.batch_info_goes_back_unmodified,
    "int8-combine": rules.the_int8_receive_buffer_cannot_be_combined,
    "mixed-max-seq-len": rules.ranks_agree_on_max_seq_len,
    "no-checks": rules.the_bindings_checks_are_made,
    "partial-group": rules.a_group_is_delivered_whole,
    "receive-before-send": rules.each_receive_is_followed_by_its_combine,
    "any-namespace": rules.it_never_stands_beside_the_real_operators,
    "any-ids": rules.a_combine_is_received_for_what_was_dispatched,
    "shared-rank": rules.a_rank_is_one_process,
    "keep-input": rules.the_second_matmul_spoils_its_input,
}
