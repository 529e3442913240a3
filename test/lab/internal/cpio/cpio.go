// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package cpio writes the archive format of Linux's initial RAM disks, "newc":
// see Documentation/driver-api/early-userspace/buffer-format.rst.
package cpio

import (
	"fmt"
	"io"
)

// Writer writes an archive.
type Writer struct {
	w   io.Writer
	ino int
	err error
}

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

const (
	directory = 0o040000
	regular   = 0o100000
)

// Dir adds a directory. Its parents must have been added.
func (w *Writer) Dir(name string) { w.entry(name, directory|0o755, nil) }

// File adds a file that all may execute.
func (w *Writer) File(name string, data []byte) { w.entry(name, regular|0o755, data) }

// Close ends the archive and returns the first error.
func (w *Writer) Close() error {
	w.entry("TRAILER!!!", 0, nil)
	return w.err
}

func (w *Writer) entry(name string, mode int, data []byte) {
	if w.err != nil {
		return
	}
	w.ino++
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		w.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	w.padded([]byte(header + name + "\x00"))
	w.padded(data)
}

// padded writes data and fills up to a multiple of four bytes.
func (w *Writer) padded(data []byte) {
	if w.err != nil {
		return
	}
	if _, w.err = w.w.Write(data); w.err != nil {
		return
	}
	_, w.err = w.w.Write(make([]byte, -len(data)&3))
}
