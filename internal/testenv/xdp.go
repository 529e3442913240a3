// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package testenv

import (
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// XDP returns the descriptor of an XDP program that passes every packet (r0 = XDP_PASS; exit), until the test ends.
func XDP(tb testing.TB) int {
	tb.Helper()
	insns := []uint64{0x2_0000_00b7, 0x95}
	license := []byte("GPL\x00")
	attr := struct {
		progType, insnCnt uint32
		insns, license    uint64
		_                 [120]byte
	}{
		progType: unix.BPF_PROG_TYPE_XDP, insnCnt: uint32(len(insns)),
		insns: uint64(uintptr(unsafe.Pointer(&insns[0]))), license: uint64(uintptr(unsafe.Pointer(&license[0]))),
	}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(insns)
	runtime.KeepAlive(license)
	if errno != 0 {
		tb.Skipf("the kernel does not load an XDP program: %v", errno)
	}
	tb.Cleanup(func() { _ = unix.Close(int(fd)) })
	return int(fd)
}
