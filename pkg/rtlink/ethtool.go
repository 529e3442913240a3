// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolRequest is struct ifreq of linux/if.h as SIOCETHTOOL takes it.
type ethtoolRequest struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [16]byte
}

// Ethtool makes an ethtool request (linux/ethtool.h) about the link that has the name. data is the request's structure and
// takes the answer; it must be as large as the request says that it is. The error is the kernel's answer as it is.
func (c *Conn) Ethtool(name string, data []byte) error {
	if len(name) >= unix.IFNAMSIZ {
		return unix.ENODEV
	}
	req := ethtoolRequest{data: unsafe.Pointer(unsafe.SliceData(data))}
	copy(req.name[:], name)
	// The kernel takes requests about links on sockets of all kinds, and by the socket's namespace.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.socket.Socket.GetFd()), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	runtime.KeepAlive(data)
	if errno != 0 {
		return errno
	}
	return nil
}
