// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package nl stands for the library's.
package nl

type NetlinkRequest struct{}

func NewNetlinkRequest(proto, flags int) *NetlinkRequest { return &NetlinkRequest{} }

func (*NetlinkRequest) Execute(int, uint16) ([][]byte, error)            { return nil, nil }
func (*NetlinkRequest) ExecuteIter(int, uint16, func([]byte) bool) error { return nil }
func (*NetlinkRequest) AddData([]byte)                                   {}
