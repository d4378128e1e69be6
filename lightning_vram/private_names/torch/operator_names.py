"""Private names of operators that our tables know, for what they cost and what their backwards read."""

VIEWS = "_unsafe_view _reshape_alias"
ELEMENTWISE = "_softmax _log_softmax _adaptive_avg_pool2d _adaptive_avg_pool3d"
GROWING = "_to_copy _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
SEVERAL_RESULTS = "_weight_norm_interface"
NORMS = "_fused_rms_norm"
BATCH_NORMS = "_native_batch_norm_legit"
EXACT_ARGUMENTS = (
    "_cdist_forward _ctc_loss _euclidean_dist _foreach_abs _foreach_lgamma _foreach_log _foreach_log10 "
    "_foreach_log1p _foreach_log2 _foreach_maximum _foreach_minimum _foreach_pow _pdist_forward"
)
EXACT_RESULTS = (
    "_cdist_forward _euclidean_dist _foreach_norm _foreach_pow _foreach_reciprocal _foreach_rsqrt _foreach_sqrt "
    "_log_softmax _pdist_forward"
)
PRODUCTS = (
    "_addmm_activation _int_mm _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 "
    "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _mixed_dtypes_linear"
)
SPARSE_PRODUCTS = (
    "_sparse_mm _sparse_addmm _cslt_sparse_mm _sparse_semi_structured_mm _sparse_semi_structured_addmm "
    "_sparse_semi_structured_linear"
)
CONVOLUTIONS = (
    "_convolution _mps_convolution _mps_convolution_transpose _conv_depthwise2d _slow_conv2d_forward "
    "_nnpack_spatial_convolution"
)
MKLDNN_PRODUCTS = "_linear_pointwise"
MKLDNN_CONVOLUTIONS = "_convolution_pointwise _convolution_transpose_pointwise"
MKL_PRODUCTS = "_mkl_linear"
RECURRENT = "_cudnn_rnn _lstm_mps _thnn_fused_lstm_cell _thnn_fused_gru_cell"
OTHER_PRODUCTS = "_trilinear"
ATTENTIONS = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps "
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward"
)
ACTIVATED_PRODUCT = "_addmm_activation"
LINEAR_ALGEBRA = "_linalg_"
"""What names of operators begin with."""
DIVIDE_EACH, NORM_OF_EACH, COPY_TO = "_foreach_div", "_foreach_norm", "_to_copy"
