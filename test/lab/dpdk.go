// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/cilium/networkdriver/test/lab/internal/image"
)

// DPDKImage is a container image with DPDK's dpdk-testpmd, the driver of igb's
// VFs, and a shell. Nodes have it after [Lab.ImportDPDK].
const DPDKImage = "networkdriver.test/dpdk:1"

const testpmd = "usr/bin/dpdk-testpmd"

// dpdkPackages have the program, and what it loads when it starts.
var dpdkPackages = []string{"dpdk-dev", "librte-net-e1000-23", "librte-mempool-ring23"}

// dpdkDriver is the name of a file that it loads, by the version of its interface, with the name that it has as a library.
var dpdkDriver = regexp.MustCompile(`^(librte_(?:net_e1000|mempool_ring|bus_pci|bus_vdev)\.so\.\d+)\.\d+$`)

// ImportDPDK gives all nodes [DPDKImage], which is made of Debian's packages
// the first time.
func (l *Lab) ImportDPDK(ctx context.Context) error {
	return l.importPrograms(ctx, programs{image: DPDKImage, short: "dpdk", packages: dpdkPackages, choose: dpdkFiles})
}

// dpdkFiles returns the program, the drivers that it loads, the libraries of both, and the links by which it finds the drivers. Some
// of them are libraries of the program as well, and must not be there twice.
func dpdkFiles(root string) (files []string, links map[string]string, err error) {
	const libraries = "usr/lib/x86_64-linux-gnu"
	dirs, err := filepath.Glob(filepath.Join(root, libraries, "dpdk/pmds-*"))
	if err != nil || len(dirs) != 1 {
		return nil, nil, fmt.Errorf("the packages have no drivers: %v %v", dirs, err)
	}
	entries, err := os.ReadDir(dirs[0])
	if err != nil {
		return nil, nil, err
	}
	programs := []string{testpmd}
	links = map[string]string{}
	for _, e := range entries {
		if m := dpdkDriver.FindStringSubmatch(e.Name()); m != nil {
			programs = append(programs, filepath.Join(libraries, m[1]))
			links[filepath.Join(libraries, "dpdk", filepath.Base(dirs[0]), e.Name())] = "../../" + m[1]
		}
	}
	libs, err := image.Libraries(root, programs...)
	return append(programs, libs...), links, err
}
