// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/cilium/networkdriver/test/lab/internal/image"
)

// RDMAImage is a container image with ibv_devices and ibv_devinfo, the
// driver of Soft-RoCE, and a shell. Nodes have it after [Lab.ImportRDMA].
const RDMAImage = "networkdriver.test/rdma:1"

var rdmaPackages = []string{"ibverbs-utils", "ibverbs-providers"}

// ImportRDMA gives all nodes [RDMAImage], which is made of Debian's packages
// the first time.
func (l *Lab) ImportRDMA(ctx context.Context) error {
	return l.importPrograms(ctx, programs{image: RDMAImage, short: "rdma", packages: rdmaPackages, choose: rdmaFiles})
}

// rdmaFiles returns the programs, Soft-RoCE's driver with the file that names
// it, and the libraries of both.
func rdmaFiles(root string) (files []string, links map[string]string, err error) {
	const config = "etc/libibverbs.d/rxe.driver"
	drivers, err := filepath.Glob(filepath.Join(root, "usr/lib/x86_64-linux-gnu/libibverbs/librxe-*.so"))
	if err != nil || len(drivers) != 1 {
		return nil, nil, fmt.Errorf("the packages have no driver of Soft-RoCE: %v %v", drivers, err)
	}
	driver, err := filepath.Rel(root, drivers[0])
	if err != nil {
		return nil, nil, err
	}
	loaded := []string{"usr/bin/ibv_devices", "usr/bin/ibv_devinfo", driver}
	libs, err := image.Libraries(root, loaded...)
	return append(append(loaded, libs...), config), map[string]string{}, err
}
