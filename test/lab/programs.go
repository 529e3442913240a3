// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/networkdriver/test/lab/internal/cache"
	"github.com/cilium/networkdriver/test/lab/internal/debian"
	"github.com/cilium/networkdriver/test/lab/internal/image"
)

// programs are Debian's, for a container image that has a shell too.
type programs struct {
	// image is its name, and short is one for files and logs.
	image, short string
	packages     []string
	// choose returns which files of the unpacked packages are in the image, and the links between them.
	choose func(root string) (files []string, links map[string]string, err error)
}

// importPrograms gives all nodes the image, which is made the first time.
func (l *Lab) importPrograms(ctx context.Context, p programs) error {
	file := filepath.Join(l.ShareDir(), p.short+".tar")
	if err := l.writePrograms(ctx, p, file); err != nil {
		return fmt.Errorf("image %s: %w", p.image, err)
	}
	for _, n := range l.Nodes() {
		if _, err := n.Run(ctx, "ctr --namespace k8s.io images import --local /share/"+filepath.Base(file)); err != nil {
			return fmt.Errorf("import %s: %w", p.image, err)
		}
	}
	return nil
}

func (l *Lab) writePrograms(ctx context.Context, p programs, file string) error {
	if _, err := os.Stat(file); err == nil {
		return nil
	}
	archive, err := debian.Open(filepath.Join(l.arts.Node.Cache, "apt"))
	if err != nil {
		return err
	}
	b := &builder{cache: cache.Cache{Dir: l.arts.Node.Cache}, progress: newProgress(nil)}
	root, err := (&packages{builder: b, archive: archive}).tree(ctx, p.short, archive.Release, p.packages...)
	if err != nil {
		return err
	}
	files, links, err := p.choose(root)
	if err != nil {
		return err
	}
	i := image.Image{
		Name:  p.image,
		Files: map[string]string{"bin/busybox": filepath.Join(l.arts.Node.QEMU, "usr/bin/busybox")},
		Links: links,
	}
	i.Links["bin/sh"], i.Links[image.Loader] = "busybox", "/"+image.LoaderTarget
	for _, f := range files {
		i.Files[f] = filepath.Join(root, f)
	}
	for _, applet := range busyboxApplets {
		i.Links["bin/"+applet] = "busybox"
	}
	f, err := os.Create(file + ".next")
	if err != nil {
		return err
	}
	if err := errors.Join(i.Write(f), f.Close()); err != nil {
		return err
	}
	return os.Rename(file+".next", file)
}
