// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

//go:build !crashpoints

package crashpoint

// Here does nothing.
func Here(Point) {}
