// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command images packs static programs into container images, one tar file for each image and architecture, which
// `ctr images import` and `docker load` read. It needs no daemon, no base image and no registry, and the same programs
// give the same digest on every machine.
//
// Programs are taken from <dir>/linux-<architecture>, and images without their main program are left out.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	dir := flag.String("dir", "_out/images", "directory with the programs, which gets the images")
	tag := flag.String("tag", "dev", "tag of the images")
	revision := flag.String("revision", "", "commit that the programs were built from")
	archs := flag.String("arch", "amd64 arm64", "architectures, with blanks between them")
	flag.Parse()
	if err := run(os.Stdout, *dir, *tag, *revision, strings.Fields(*archs)); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

// run prints a line for each image: file, name and digest.
func run(out io.Writer, dir, tag, revision string, archs []string) error {
	for _, arch := range archs {
		made := 0
		for _, image := range images {
			image.arch, image.tag, image.revision = arch, tag, revision
			image.dir = filepath.Join(dir, "linux-"+arch)
			if !image.has(image.program) {
				continue
			}
			path := filepath.Join(dir, fmt.Sprintf("%s-linux-%s.tar", image.program, arch))
			digest, err := image.writeFile(path)
			if err != nil {
				return fmt.Errorf("image %s: %w", image.ref(), err)
			}
			fmt.Fprintf(out, "%s  %s  linux/%s  %s\n", path, image.ref(), arch, digest)
			made++
		}
		if made == 0 {
			return fmt.Errorf("%s has none of the programs: build them first", filepath.Join(dir, "linux-"+arch))
		}
	}
	return nil
}
