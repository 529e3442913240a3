// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package unix stands for the real one.
package unix

const (
	NLM_F_ACK  = 0x4
	NLM_F_DUMP = 0x300
)
