"""Public reports of faults in serving engines, as tests against a real server.

Each case stands for a kind of fault. Long variants are marked `slow`.

=====  ===============================================================================  =======
case   test                                                                             state
=====  ===============================================================================  =======
ST-1   test_streaming.test_st_1_usage_comes_when_asked_for                              tested
ST-2   test_streaming.test_st_2_every_stream_ends_as_it_should                          tested
ST-3   test_streaming.test_st_3_a_refusal_is_the_same_streamed_or_not                   tested
SP-1   test_stops.test_sp_1_nothing_of_a_stop_text_is_sent                              tested
SP-2   test_stops.test_sp_2_what_was_held_back_comes_at_the_end                         tested
SP-3   test_stops.test_sp_3_no_stop_before_min_tokens, ..._ignore_eos_goes_on_...       tested
LP-1   test_logprobs.test_lp_1_each_position_has_its_own_list                           tested
LP-2   test_logprobs.test_lp_2_as_many_alternatives_as_asked_for                        tested
LP-3   test_logprobs.test_lp_3_impossible_values_are_finite, test_formats.test_lp_3_...tested
LP-4   test_logprobs.test_lp_4_a_prompt_can_be_read_without_an_answer                   tested
NS-1   test_choices.test_ns_1_a_seed_gives_the_same_different_answers                   tested
NS-2   test_choices.test_ns_2_n_choices_are_n, ..._streamed_choices_end_...             tested
NS-3   test_choices.test_ns_3_unseeded_answers_differ                                   tested
PN-1   test_penalties.test_pn_1_only_repetition_looks_at_the_prompt                     tested
PN-2   test_penalties.test_pn_2_odd_values_are_refused_and_good_streams_unharmed        tested
BI-1   test_bad_input_live.test_bi_1_2_3_fields                                         tested
BI-2   test_bad_input_live.test_bi_1_2_3_fields, ..._the_vocabulary_ends_...            tested
BI-3   test_bad_input_live.test_bi_3_large_wishes_take_no_memory                        tested
BI-4   test_bad_input_live.test_bi_4_what_is_too_large_is_cut, ..._half_requests_...    tested
BI-5   test_bad_input_live.test_bi_1_2_3_5_raw_bodies, test_bi_5_...                    tested
CT-1   test_chat_template.test_ct_1_all_parts_arrive                                    tested
CT-2   test_chat_template.test_ct_2_a_call_without_content_is_a_message                 tested
CT-3   test_chat_template.test_ct_3_an_empty_system_message_is_one                      tested
CT-4   test_chat_template.test_ct_4_the_template_speaks_for_itself, ..._a_broken_...    tested
RF-1   test_formats.test_rf_1_a_list_of_two_has_two                                    tested
RF-2   test_formats.test_rf_2_broken_schemas                                           tested
RF-3   test_formats.test_rf_3_no_endless_blanks_or_digits                              tested
RF-4   test_formats.test_rf_4_others_are_not_spoiled_and_hard_ones_...                 tested
TC-1   test_tools.test_tc_1_tool_choice, ..._schemas_that_cannot_be_...                 tested
TC-2   test_tools.test_tc_2_a_forced_call_says_..., ..._required_calls_are_...          tested
TC-3   tests/text/test_tool_parsers.py: ..._however_they_are_cut                        tested
TK-1   test_tokenization.test_tk_1_three_ways_to_send_one_prompt                        tested
TK-2   test_tokenization.test_tk_2_characters_are_sent_whole, ..._what_is_no_...        tested
TK-3   test_tokenization.test_tk_3_bytes_are_the_real_ones                              tested
TK-4   test_tokenization.test_tk_4_typed_markers_stay_text, ..._a_leading_space_stays   tested
LE-1   test_long_prompts.test_le_1_too_long_is_refused_at_once                          tested
LE-2   test_long_prompts.test_le_2_the_message_has_the_numbers                          tested
LE-3   test_long_prompts.test_le_3_the_last_tokens_of_the_context                       tested
AB-1   test_aborts.test_ab_1_a_closed_stream_stops                                      tested
AB-2   test_aborts.test_ab_2_a_closed_plain_request_stops, ..._who_waits_...            tested
CC-1   test_formats.test_cc_1_each_of_many_gets_its_own                                tested
CC-2   test_prefix_cache.test_cc_2_cache_and_batch_change_nothing                       tested
CC-3   test_prefix_cache.test_cc_3_cached_tokens_are_whole_blocks_below_the_last        tested
PR-1   test_preemption.test_pr_1_2_a_crowd_answers_as_each_alone                        tested
PR-2   test_preemption.test_pr_2_who_leaves_while_put_back_leaves_nothing               tested
MH-1   test_metrics.test_mh_1_gauges_fall_when_all_leave_at_once                        tested
MH-2   test_metrics.test_mh_2_counters_agree_with_what_was_asked                        tested
MH-3   tests/e2e/test_serve.py: ..._a_dead_core_costs_..., ..._a_paused_core_...        tested
MH-4   test_metrics.test_mh_4_a_large_body_holds_up_nobody                              tested
=====  ===============================================================================  =======
"""
