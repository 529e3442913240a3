// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package statedir keeps small files that outlive the process in a directory that nobody else may write to. A file is
// there as a whole or not at all, whenever process or machine stop, and what else may be found by its name is no file.
package statedir

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrNotFile is wrapped by errors about something by the file's name that is not a regular file.
var ErrNotFile = errors.New("not a regular file")

// Make makes the directory if it is not there, for its owner alone, and refuses one that others may write to: what is
// found there decides what happens to network interfaces.
func Make(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the state directory: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("look at the state directory: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s has mode %#o and owner %d: needed is a directory of user %d that nobody else may write to", dir, st.Mode, st.Uid, os.Geteuid())
	}
	return nil
}

// Read reads at most limit bytes of the file. Anything but a regular file must neither lead elsewhere nor block; it is an
// error that wraps [ErrNotFile].
func Read(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%w: it is a symbolic link", ErrNotFile)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, ErrNotFile
	}
	return io.ReadAll(io.LimitReader(f, limit))
}

// Temp is where the content of the file is written before it gets the file's name.
func Temp(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
}

// Write makes data the content of the file, and returns when that is durable. Nobody else may write the same file at
// the time.
func Write(path string, data []byte) error {
	tmp := Temp(path)
	err := writeSynced(tmp, data)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp)
		return err
	}
	return sync(filepath.Dir(path))
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

// Remove removes the file, if there is one, and what a writer of it that was killed has left.
func Remove(path string) error {
	var removed bool
	for _, path := range []string{path, Temp(path)} {
		err := os.Remove(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		removed = removed || err == nil
	}
	if !removed {
		return nil
	}
	return sync(filepath.Dir(path))
}

// sync makes names that were added to the directory or removed last.
func sync(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
